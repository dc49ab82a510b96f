"""Predict what a plan needs and takes, and find what it could be changed into.

The package is a function as well: `headrace.predict(plan)` is `headrace.api.calls.predict`.
"""

from headrace.core.callable_room import make_callable

make_callable(__name__, "predict")

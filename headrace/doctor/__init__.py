"""Find where time and memory went, and what to change.

The package is a function as well: `headrace.doctor(run)` is `headrace.api.calls.doctor`.
"""

from headrace.core.callable_room import make_callable

make_callable(__name__, "doctor")

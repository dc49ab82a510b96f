"""Hold the life of a run, from its first step to its report.

The package is a function as well: `headrace.train(plan)`, and `headrace.train.run(plan)`, is
`headrace.api.calls.train`.
"""

from headrace.core.callable_room import make_callable

make_callable(__name__, "train", run=True)

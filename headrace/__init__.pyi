from typing import Protocol

from headrace.api.calls import doctor as doctor
from headrace.api.calls import predict as predict
from headrace.api.calls import tune as tune
from headrace.api.commands import run_command as run_command
from headrace.api.opened import open_run as open_run
from headrace.api.plans import AnyPlan
from headrace.api.plans import read_plan as read_plan
from headrace.core.errors import HeadraceError as HeadraceError
from headrace.core.progress import Progress
from headrace.plan.plan import Plan as Plan
from headrace.train.result import Result
from headrace.watch import watch as watch

__version__: str

class _Train(Protocol):
    def __call__(
        self,
        plan: AnyPlan,
        *,
        resume: bool = False,
        checkpoint: str | None = None,
        progress: Progress | bool = True,
    ) -> Result: ...
    run = __call__

train: _Train

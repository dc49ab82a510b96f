"""Show how much of a run's time makes steps, by the interval of checkpoints and the restart."""

from typing import TYPE_CHECKING

from headrace.cli.terminal import show_json, show_table
from headrace.core.errors import UnsupportedError

if TYPE_CHECKING:
    from headrace.plan.plan import Plan
    from headrace.predict.failures import Failures
    from headrace.predict.prediction import Prediction


def show_goodput(plan: "Plan", prediction: "Prediction", *, on_gpu: bool, as_json: bool) -> None:
    """Print a table of goodput: a row for an interval of checkpoints, a column for a restart.

    Raises:
        UnsupportedError: no time is predicted, or the plan says that nothing fails.
    """
    failures = _failures(plan, prediction, on_gpu=on_gpu)
    minutes, rows = failures.table()
    if as_json:
        cells = [
            {"every_steps": steps, "restart_minutes": m, "goodput": share}
            for steps, shares in rows
            for m, share in zip(minutes, shares, strict=True)
        ]
        show_json({**failures.to_dict(), "table": cells})
        return
    head = ["checkpoint.every_steps", *(f"restart in {m:g} min" for m in minutes)]
    table = [(f"{steps}{_mark(steps, failures)}", *_percents(shares)) for steps, shares in rows]
    show_table(head, table, f"goodput of {plan.name}")
    print(*failures.lines(), sep="\n")


def _failures(plan: "Plan", prediction: "Prediction", *, on_gpu: bool) -> "Failures":
    """Return what failures take of the run, however seldom they are."""
    from headrace.predict.failures import failures_of

    step_s, steps = prediction.time.step_s, prediction.run.steps
    if step_s is None or not steps:
        why = prediction.time.unknown or f"nobody knows when it ends: {prediction.run.until}"
        raise UnsupportedError(
            f"goodput is told by the time of a run, and that is not predicted: {why}",
            "headrace plan demo --device-name 'NVIDIA H200' --goodput",
        )
    failures = failures_of(plan, step_s, steps * step_s, on_gpu=on_gpu, fewest=0.0)
    if failures is None:
        raise UnsupportedError(
            "nothing fails: hardware.failures_per_1000_gpu_days = 0, as on a CPU where it is open",
            "hardware.failures_per_1000_gpu_days=0.47",
        )
    return failures


def _mark(steps: int, failures: "Failures") -> str:
    """Return which interval of the table is the plan's, and which about the best."""
    marks = {failures.every_steps: "the plan's", failures.best_every_steps: "about the best"}
    return f" ({marks[steps]})" if steps in marks else ""


def _percents(shares: list[float]) -> list[str]:
    return [f"{share:.2%}" for share in shares]

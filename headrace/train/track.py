"""Write metrics to loggers beside metrics.jsonl.

They need the `track` extra and are off by default.
"""

import json
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from headrace.core.errors import UnsupportedError
from headrace.plan.plan import Plan


class Tracker(Protocol):
    """A tracker is a logger of one kind, such as TensorBoard."""

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of one step."""
        ...

    def close(self) -> None:
        """Flush and close the logger."""
        ...


class TensorBoard:
    """Write TensorBoard event files in the folder of the run."""

    def __init__(self, plan: Plan, folder: Path, step: int = 0) -> None:
        from torch.utils.tensorboard import SummaryWriter

        # A resumed run, also one resumed from its beginning, shows each row after `step` only once.
        self._writer = SummaryWriter(str(folder / "tensorboard"), purge_step=step + 1)

    def log(self, row: Mapping[str, Any]) -> None:
        """Write one scalar for each number of a step."""
        for key, value in row.items():
            self._writer.add_scalar(key, value, row["step"])

    def close(self) -> None:
        """Flush and close the event file."""
        self._writer.close()


class WandB:
    """Write a Weights & Biases run that is named after the folder of the run."""

    def __init__(self, plan: Plan, folder: Path) -> None:
        import wandb  # pyright: ignore[reportMissingImports]

        self._run = wandb.init(
            project="headrace", name=folder.name, dir=str(folder), config=plan.dump()
        )

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of one step in one call."""
        self._run.log(dict(row), step=row["step"])

    def close(self) -> None:
        """Finish the Weights & Biases run."""
        self._run.finish()


class MLflow:
    """Write an MLflow run that is named after the folder of the run.

    It goes to the tracking store that MLflow is configured with.
    """

    def __init__(self, plan: Plan, folder: Path) -> None:
        import mlflow  # pyright: ignore[reportMissingImports]

        self._mlflow = mlflow
        mlflow.set_experiment("headrace")
        mlflow.start_run(run_name=folder.name)
        mlflow.log_dict(plan.dump(), "plan.json")

    def log(self, row: Mapping[str, Any]) -> None:
        """Write all numbers of one step."""
        self._mlflow.log_metrics({k: float(v) for k, v in row.items()}, step=row["step"])

    def close(self) -> None:
        """End the MLflow run."""
        self._mlflow.end_run()


TRACKERS: dict[str, tuple[str, Callable[[Plan, Path], Tracker]]] = {
    "tensorboard": ("tensorboard", TensorBoard),
    "wandb": ("wandb", WandB),
    "mlflow": ("mlflow", MLflow),
}


def open_trackers(plan: Plan, folder: Path, step: int = 0) -> list[Tracker]:
    """Return the loggers that `track.to` names, for a run that continues after `step`.

    Raises:
        UnsupportedError: one is not installed.
    """
    for name in plan.track.to:
        if find_spec(TRACKERS[name][0]) is None:
            raise UnsupportedError(
                f"track.to asks for {name}, which is not installed",
                "pip install 'headrace[track]', or 'track.to=[]'",
            )
    return [_opened(name, plan, folder, step) for name in plan.track.to]


def _opened(name: str, plan: Plan, folder: Path, step: int) -> Tracker:
    try:
        if name == "tensorboard" and step:  # rows past the checkpoint are logged again
            return TensorBoard(plan, folder, step)
        return TRACKERS[name][1](plan, folder)
    except Exception as error:  # a client raises any type without a network or a login
        rest = [other for other in plan.track.to if other != name]
        raise UnsupportedError(
            f"track.to asks for {name}, which does not start: {error}",
            f"'track.to={json.dumps(rest)}', or set {name} up as its documentation says",
        ) from error


class Trackers:
    """Hold the loggers of a run.

    A logger that fails is reported once and removed, and the run goes on.

    Args:
        trackers: the loggers that `open_trackers` returned.
        warn: called with a line about a logger that failed.
    """

    def __init__(self, trackers: list[Tracker], warn: Callable[[str], None]) -> None:
        self._trackers, self._warn = trackers, warn

    def log(self, row: Mapping[str, Any]) -> None:
        """Write the numbers of one step to each logger."""
        self._each(lambda tracker: tracker.log(row))

    def close(self) -> None:
        """Flush and close each logger."""
        self._each(lambda tracker: tracker.close())

    def _each(self, call: Callable[[Tracker], None]) -> None:
        for tracker in [*self._trackers]:
            try:
                call(tracker)
            except Exception as error:
                self._trackers.remove(tracker)
                name = type(tracker).__name__
                self._warn(f"{name} failed and gets nothing more: {error}; metrics.jsonl has all")

"""The callback that attaches a watch to a Hugging Face Trainer."""

from importlib.util import find_spec
from typing import Any

from headrace.core.errors import UnsupportedError


def trainer_callback(watched: Any) -> Any:
    """A TrainerCallback that watches while the Trainer trains.

    The Trainer makes its optimizer and loader itself, so they are known when training begins.

    Raises:
        UnsupportedError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        told = "watching a Trainer needs transformers, which is not installed"
        raise UnsupportedError(told, "pip install 'headrace[hf]'")
    from transformers import TrainerCallback

    class Watching(TrainerCallback):
        """Attached from the beginning of training to its end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            loader = its.get("train_dataloader")
            watched.attach(its["model"], its["optimizer"], loader, arguments=args)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            if getattr(its.get("optimizer"), "step_was_skipped", False):
                watched.note(skipped=True)

        def on_log(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            norm = (its.get("logs") or {}).get("grad_norm")  # of the step that has just ended
            if norm is not None:
                watched.note(grad_norm=norm, max_norm=args.max_grad_norm or None)

        def on_train_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            watched.close()

    return Watching()

"""Attach a watch to a Hugging Face Trainer by a callback."""

from importlib.util import find_spec
from typing import Any

from headrace.core.errors import UnsupportedError


def trainer_callback(watched: Any) -> Any:
    """Return a TrainerCallback that watches while the Trainer trains.

    The Trainer makes its optimizer and loader itself, so they are known when training begins.
    Between two steps it says when it has logged, evaluated and saved, so that these are timed
    apart.

    Raises:
        UnsupportedError: transformers is not installed.
    """
    if find_spec("transformers") is None:
        message = "watching a Trainer needs transformers, which is not installed"
        raise UnsupportedError(message, "pip install 'headrace[hf]'")
    from transformers import TrainerCallback

    def asks(control: Any, what: str) -> bool:
        return getattr(control, f"should_{what}", False)

    def after_log(control: Any) -> str:
        """Return what a Trainer does next between steps: it logs, then evaluates, then saves."""
        return "eval" if asks(control, "evaluate") else "other"

    class Watching(TrainerCallback):
        """Watch from the beginning of training to its end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            loader = its.get("train_dataloader")
            watched.attach(its["model"], its["optimizer"], loader, arguments=args)

        def on_optimizer_step(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            if getattr(its.get("optimizer"), "step_was_skipped", False):
                watched.note(skipped=True)

        def on_step_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            watched.between("other" if asks(control, "log") else after_log(control))

        def on_epoch_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            self.on_step_end(args, state, control)

        def on_evaluate(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            watched.between("other")

        def on_save(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            watched.between("other", was="checkpoint")  # a push to a hub included

        def on_log(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            norm = (its.get("logs") or {}).get("grad_norm")  # of the step that has just ended
            if norm is not None:
                watched.note(grad_norm=norm, max_norm=args.max_grad_norm or None)
            watched.between(after_log(control))  # what is logged of an evaluation is part of it

        def on_train_end(self, args: Any, state: Any, control: Any, **its: Any) -> None:
            watched.close()

    return Watching()

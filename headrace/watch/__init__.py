"""Read the cheap signals of a run from any PyTorch loop, in three lines: `headrace.watch`.

    watched = headrace.watch(model, optimizer, loader)
    for batch in watched.loader: ...                     # train as before
    watched.save("report.json")

    watched = headrace.watch()                           # a Hugging Face Trainer
    trainer.add_callback(watched.callback())             # and after trainer.train():
    watched.save("report.json")

What is read: phase times by events in the stream, the wait for each batch, whether the device had
run dry when a step's first work came, padding and targets of batches that name them, the compiler's
counters, the allocator's, the gradients' norm before each update, and what `note` is given. Nothing
waits for the device: an event is queried and never synchronized, numbers on the device are copied
behind the step and read when it is complete. Events and their buffers are pooled, so a steady step
makes none.

How: torch's own hooks on the model's forward and on `optimizer.step`, which ends a step; "backward"
is what stands between them, the loss included; "other" is what the loop does between steps. The
loader gets a subclass of its own class that times `next`; one that allows none (a list, a
generator) is timed in a wrapper. `close` takes all of it off. Hooks are inert while torch.compile
traces them and in copies of the model, and none changes a number.

With `trace=FOLDER` a profiler window of a few steady steps is recorded there as well, see
headrace/observe/profiler.py; its steps are left out of the steady ones, and the doctor reads it
beside what was saved. What a GPU reports of its clock is read every ten seconds, where nvidia-ml-py
is installed.

Left out, as the report says: exposed communication, kernels, and checkpoints, which are part of
"other" but for a Trainer, which says when it has saved.
Steps that are replayed by a CUDA graph or whose `optimizer.step` is compiled are not seen.
"""

import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from torch import nn

from headrace.core.errors import ConfigError
from headrace.watch.clock import WATCH
from headrace.watch.watched import Watched


def watch(
    model: nn.Module | None = None,
    optimizer: Any = None,
    loader: Any = None,
    *,
    trace: str | Path | None = None,
) -> Watched:
    """Watch a training loop.

    Args:
        model: on its device, as it will be called.
        optimizer: a torch.optim.Optimizer, or one of accelerate's; its `step` ends a step.
        loader: what batches come from; iterate over `.loader` of what is returned.
        trace: the folder for a trace of a few steps soon after the start; without it none is made.

    The first three are left out where `callback()` is given to a Trainer.

    Raises:
        ConfigError: a model without an optimizer whose steps can be seen, or the other way round;
            or a model that is no nn.Module.
    """
    if model is None and optimizer is None and loader is None:
        return Watched(trace)
    if model is None or optimizer is None:
        missing = "a model" if model is None else "an optimizer"
        message = f"headrace.watch was given no {missing.split()[1]}, and a step cannot be seen"
        raise ConfigError(f"{message} without {missing}", WATCH)
    if not isinstance(model, nn.Module):
        raise ConfigError(
            f"headrace.watch was given a {type(model).__name__}, and its hooks need an nn.Module",
            WATCH,
        )
    return Watched(trace).attach(model, optimizer, loader)


class _Callable(ModuleType):
    """`headrace.watch` is this module and what it holds: importing either leaves both usable."""

    def __call__(self, *args: Any, **named: Any) -> Watched:
        return watch(*args, **named)


sys.modules[__name__].__class__ = _Callable

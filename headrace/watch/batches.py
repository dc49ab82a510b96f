"""A loader whose every wait is timed, and what its batches say of their tokens."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import Tensor

IGNORED = -100
"""The label that torch's cross-entropy leaves out."""

SET_CLASS = object.__dict__["__class__"].__set__
"""accelerate's loaders hide their class behind a property of that name."""
Timed = Callable[..., Any]
"""(call, source, opens) -> call(source), timed; `opens` where a pass over the data begins."""


class Batches:
    """Stands for a loader, or for one pass over it."""

    def __init__(self, source: Any, timed: Timed) -> None:
        self._source, self._timed = source, timed

    def __iter__(self) -> Iterator[Any]:
        if hasattr(type(self._source), "__next__"):
            return self
        return Batches(self._timed(iter, self._source, opens=True), self._timed)

    def __next__(self) -> Any:
        return self._timed(next, self._source)

    def __len__(self) -> int:
        return len(self._source)

    def __bool__(self) -> bool:
        return bool(self._source)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__.get("_source"), name)


def watch_loader(loader: Any, timed: Timed) -> tuple[Any, Callable[[], None]]:
    """The loader to iterate over, and what undoes it.

    It is the same object where its class can have a subclass: then whoever holds it is timed too.
    """
    kind = type(loader)
    name = "__next__" if hasattr(kind, "__next__") else "__iter__"

    def watching(this: Any) -> Any:
        plain = getattr(kind, name)
        if this is not loader:  # a copy of it
            return plain(this)
        if name == "__next__":
            return timed(plain, this)
        return Batches(timed(plain, this, opens=True), timed)

    try:
        watched = type(kind.__name__, (kind,), {name: watching, "__module__": kind.__module__})
        SET_CLASS(loader, watched)
    except TypeError:
        return Batches(loader, timed), lambda: None

    def undo() -> None:
        if type(loader) is watched:
            SET_CLASS(loader, kind)

    return loader, undo


def loss_in(output: Any) -> Any:
    """Return the loss that a model's output names or holds; None where there is none.

    A mapping or an object names it `loss`; in a tuple or list it is the only scalar that needs a
    gradient, or the first of them.
    """
    if isinstance(output, Mapping):
        return output.get("loss")
    named = getattr(output, "loss", None)
    if named is not None or not isinstance(output, tuple | list):
        return named
    tensors = [item for item in output if isinstance(item, Tensor)]
    return next((item for item in tensors if item.numel() == 1 and item.requires_grad), None)


def token_counts(batch: Any) -> dict[str, Any]:
    """Return how many slots a batch has, and how many are padding and targets.

    A batch names `input_ids`, or is a pair of integer tensors of one shape: inputs and targets.
    "tokens" is an int; "padded" and "targets" are tensors where the batch is. `attention_mask` says
    what is padding and `labels` what is a target; in a pair, an ignored target is padding.
    """
    if isinstance(batch, tuple | list) and len(batch) == 2:
        ids, labels = batch
        both = isinstance(ids, Tensor) and isinstance(labels, Tensor)
        if not both or ids.shape != labels.shape or ids.ndim < 2:
            return {}
        if any(item.is_floating_point() or item.is_complex() for item in (ids, labels)):
            return {}
        ignored = (labels == IGNORED).sum()
        return {"tokens": ids.numel(), "padded": ignored, "targets": ids.numel() - ignored}
    if not isinstance(batch, Mapping) or not isinstance(ids := batch.get("input_ids"), Tensor):
        return {}
    found: dict[str, Any] = {"tokens": ids.numel()}
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        found["padded"] = (mask == 0).sum()
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        found["targets"] = (labels != IGNORED).sum()
    return found

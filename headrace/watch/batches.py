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


def token_counts(batch: Any) -> dict[str, Any]:
    """Of a batch that names `input_ids`: its slots, and how many are padding and targets.

    "tokens" is an int; "padded" and "targets" are tensors where the batch is, and stand there only
    if `attention_mask` and `labels` say so for each token.
    """
    ids = batch.get("input_ids") if isinstance(batch, Mapping) else None
    if not isinstance(ids, Tensor):
        return {}
    found: dict[str, Any] = {"tokens": ids.numel()}
    mask, labels = batch.get("attention_mask"), batch.get("labels")
    if isinstance(mask, Tensor) and mask.shape == ids.shape:
        found["padded"] = (mask == 0).sum()
    if isinstance(labels, Tensor) and labels.shape == ids.shape:
        found["targets"] = (labels != IGNORED).sum()
    return found

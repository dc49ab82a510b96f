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
    """Return the loss that a model's output is, names or holds; None where there is none.

    It is the output itself where that is a scalar that needs a gradient. A mapping or an object
    names it `loss`, or is one whose only name that ends so is a scalar, as `lm_loss`; in a tuple or
    list it is the first scalar that needs a gradient. One level inside is looked at as well.
    """
    if isinstance(output, Tensor) and output.ndim:  # as the score of one example is
        return None
    return _loss_in(output, deeper=True)


def _loss_in(output: Any, *, deeper: bool) -> Any:
    if isinstance(output, Tensor):
        return output if output.numel() == 1 and output.requires_grad else None
    if isinstance(output, Mapping):
        if output.get("loss") is not None:
            return output["loss"]
        named = [value for key, value in output.items() if str(key).endswith("loss")]
        if named:  # of several, nothing says which is the whole
            return _loss_in(named[0], deeper=False) if len(named) == 1 else None
        inside: list[Any] = list(output.values())
    elif isinstance(output, tuple | list):
        if getattr(output, "loss", None) is not None:  # a named tuple
            return output.loss  # pyright: ignore[reportAttributeAccessIssue]
        inside = [item for item in output if isinstance(item, Tensor)]
        found = next((one for one in inside if _loss_in(one, deeper=False) is not None), None)
        if found is not None:
            return found
        inside = [item for item in output if not isinstance(item, Tensor)]
    else:
        return getattr(output, "loss", None)
    within = (_loss_in(item, deeper=False) for item in inside if not isinstance(item, Tensor))
    return next((one for one in within if one is not None), None) if deeper else None


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

"""Time every wait for a loader, and count the tokens of its batches."""

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

IGNORED = -100
"""The label that torch's cross-entropy leaves out."""

SET_CLASS = object.__dict__["__class__"].__set__
"""accelerate's loaders hide their class behind a property of that name."""
Timed = Callable[..., Any]
"""(call, source, opens) -> call(source), timed; `opens` where a pass over the data begins."""


class Batches:
    """Wrap a loader, or one pass over it."""

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
    """Return the loader to iterate over, and what undoes the watching.

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


WHOLE = ("loss", "total_loss", "loss_total")
"""Names of the loss that a model is trained by, where others stand beside it; in any case."""
TARGETS = ("labels", "targets", "label", "target", "y", "label_ids", "lm_labels")
INPUTS = ("input_ids", "inputs", "ids", "tokens", "x", "input")
MASKS = ("attention_mask", "mask")
"""Names of what a batch holds."""


def loss_in(output: Any) -> Any:
    """Return the loss that a model's output is, names or holds; None where there is none.

    It is the output itself where that is a scalar that needs a gradient. A mapping, a dataclass or
    a named tuple names it as one of WHOLE, or has only one name that ends in "loss" and is a
    scalar, as `lm_loss`; in a tuple or list it is the only scalar that needs a gradient. Of several
    nothing says which is the whole. One level inside is looked at as well.
    """
    if isinstance(output, Tensor) and output.ndim:  # as the score of one example is
        return None
    return _loss_in(output, deeper=True)


def _loss_in(output: Any, *, deeper: bool) -> Any:
    if isinstance(output, Tensor):
        return output if output.numel() == 1 and output.requires_grad else None
    inside: list[Any]
    if isinstance(output, tuple | list) and not hasattr(output, "_fields"):
        inside = [*output]
        scalars = [one for one in inside if isinstance(one, Tensor) and _is_loss(one)]
        if scalars:
            return scalars[0] if len(scalars) == 1 else None
    else:
        fields = _fields(output)
        by_name = {str(key).lower(): value for key, value in fields.items()}
        whole = next((by_name[n] for n in WHOLE if by_name.get(n) is not None), None)
        if whole is not None and not isinstance(whole, Mapping):
            return whole
        named = [v for key, v in by_name.items() if key.endswith("loss") and v is not None]
        if named:
            return _loss_in(named[0], deeper=False) if len(named) == 1 else None
        inside = [*fields.values()]
    within = (_loss_in(item, deeper=False) for item in inside if not isinstance(item, Tensor))
    return next((one for one in within if one is not None), None) if deeper else None


def _is_loss(value: Tensor) -> bool:
    return value.numel() == 1 and value.requires_grad


def _fields(output: Any) -> Mapping[Any, Any]:
    """Return what an output names: the keys of a mapping, or the attributes of an object."""
    if isinstance(output, Mapping):
        return output
    if hasattr(output, "_fields"):
        return dict(zip(output._fields, output, strict=True))
    fields = {k: v for k, v in getattr(output, "__dict__", {}).items() if not k.startswith("_")}
    return fields | {name: getattr(output, name, None) for name in WHOLE}


def token_counts(batch: Any) -> dict[str, Any]:
    """Return how many slots a batch has, and how many are padding and targets.

    A batch names its inputs, targets and mask as INPUTS, TARGETS and MASKS have them, or is a tuple
    or list of integer tensors of one size: inputs and targets, and perhaps a mask among them. One
    batch alone in a tuple, or in a mapping of one name, is looked at inside.

    "tokens" is an int; "padded" and "targets" are tensors where the batch is. A mask says what is
    padding; where a pair has none, an ignored target is padding.
    """
    if isinstance(batch, Mapping):
        names = {str(key).lower(): value for key, value in batch.items()}
        ids, labels, mask = (_named(names, known) for known in (INPUTS, TARGETS, MASKS))
        if ids is None:
            only = [value for value in batch.values() if isinstance(value, Mapping | tuple | list)]
            return token_counts(only[0]) if len(batch) == len(only) == 1 else {}
        return _counts(ids, labels, mask) if "input_ids" in names or labels is not None else {}
    if not isinstance(batch, tuple | list):
        return {}
    if len(batch) == 1:
        return token_counts(batch[0]) if isinstance(batch[0], Mapping) else {}
    if not 2 <= len(batch) <= 3 or not all(_is_whole(item) for item in batch):
        return {}
    ids, rest = batch[0], batch[1:]
    if ids.ndim < 2 or any(item.numel() != ids.numel() for item in rest):
        return {}
    masks = [item for item in rest if len(rest) > 1 and _is_mask(item)]
    labels = [item for item in rest if not any(item is mask for mask in masks)]
    if len(labels) != 1:
        return {}
    counts = _counts(ids, labels[0], masks[0] if masks else None)
    return counts if masks else {**counts, "padded": (labels[0] == IGNORED).sum()}


def _named(names: Mapping[str, Any], known: tuple[str, ...]) -> Tensor | None:
    value = next((names[name] for name in known if name in names), None)
    return value if _is_whole(value) else None


def _is_whole(value: Any) -> bool:
    """Return whether it is a tensor of integers or of yes and no."""
    return isinstance(value, Tensor) and not (value.is_floating_point() or value.is_complex())


def _is_mask(value: Tensor) -> bool:
    """Return whether it says yes or no of each slot; of integers only where that costs no wait.

    Zeros alone are kinds of tokens (`token_type_ids`): a batch of nothing but padding is none.
    """
    if value.dtype == torch.bool:
        return True
    if value.device.type != "cpu" or not value.numel():
        return False
    return int(value.min()) >= 0 and int(value.max()) == 1


def _counts(ids: Tensor, labels: Tensor | None, mask: Tensor | None) -> dict[str, Any]:
    counts: dict[str, Any] = {"tokens": ids.numel()}
    if mask is not None and mask.numel() == ids.numel():
        counts["padded"] = (mask == 0).sum()
    if labels is not None and labels.numel() == ids.numel():
        counts["targets"] = (labels != IGNORED).sum()
    return counts

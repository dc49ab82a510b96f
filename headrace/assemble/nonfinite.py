"""Name what made the first number that is not finite: a weight, a module or a gradient.

A loss of NaN says nothing of where it comes from. Here the step is computed once more, from the
same micro-batches and the weights as they are, outside of compiled code and with a hook on every
module: the first one that makes a NaN or an infinity is named with the type of its numbers and the
largest one that it was given. Where the forward pass is finite, the first gradient of a parameter
that is not is named. It costs one step, and is asked for only when a step was not finite.

Where several processes share a run, only the weights are looked at: they would have to compute
together, and may be a step apart. What cannot be computed again is not named; no error comes of it.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from enum import Enum
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_iter

from headrace.assemble.sockets import Build, Unwatched
from headrace.model.head import IGNORED
from headrace.parallel.layout import local_of


class Where(Enum):
    """Say in what the first number that is not finite was found."""

    WEIGHT = "weight"
    MODULE = "module"
    GRADIENT = "gradient"


@dataclass(frozen=True)
class NonFiniteSource:
    """A source is what made the first number that is not finite.

    Args:
        where: in what it was found.
        name: the parameter, or the module; "" is the whole model.
        dtype: the type of its numbers, as in "float32".
        largest: the largest finite absolute number in it, or in what a module was given.
        kind: the class of a module; "" for a parameter.
    """

    where: Where
    name: str
    dtype: str
    largest: float
    kind: str = ""

    @property
    def sentence(self) -> str:
        """Return the source in words, without a full stop."""
        if self.where is Where.WEIGHT:
            words = f"the weight {self.name} ({self.dtype}) holds a number that is not finite"
            return f"{words}; its largest finite one is {self.largest:.3g}"
        if self.where is Where.GRADIENT:
            return (
                f"the first gradient that is not finite is that of {self.name} ({self.dtype}), "
                f"whose largest finite number is {self.largest:.3g}"
            )
        called = f"{self.name} ({self.kind})" if self.name else f"the model ({self.kind})"
        return (
            f"the first module whose output is not finite is {called}, in {self.dtype}; the "
            f"largest number that it was given is {self.largest:.3g}"
        )


def because(source: NonFiniteSource | None) -> str:
    """Return what to add to a message on a number that is not finite; "" without a source."""
    return "" if source is None else f"; {source.sentence}"


def wild_weight(build: Build) -> NonFiniteSource | None:
    """Return this rank's first weight that is not finite; None where all are. Waits."""
    parts = {n: local_of(p.detach()) for n, p in build.model.named_parameters()}
    parts = {n: part for n, part in parts.items() if part.is_floating_point()}
    if not parts:
        return None
    finite = torch.stack([torch.isfinite(part).all() for part in parts.values()]).tolist()
    for (name, part), is_finite in zip(parts.items(), finite, strict=True):
        if not is_finite:
            return NonFiniteSource(Where.WEIGHT, name, _dtype(part), _largest([part]))
    return None


def first_nonfinite(build: Build, index: int) -> NonFiniteSource | None:
    """Return what makes the first number of a step that is not finite, or None if nothing does.

    Args:
        build: the run, between two steps. Its gradients, random state and place in the stream are
            afterwards as before.
        index: the index of the step, 0 for the first.
    """
    try:
        source = wild_weight(build)
        if source is not None or build.world.ranks > 1:
            return source
        sources: list[NonFiniteSource] = []
        with _as_it_was(build, index), _hooks(build, sources):
            _compute(build, index)
        return sources[0] if sources else None
    except Exception:  # what ends the run is told in any case
        return None


def _compute(build: Build, index: int) -> None:
    """Run forward and backward of a step's first pass, without an update."""
    work = []
    for micro in build.loader.peek(index):
        for recut in build.recut:
            micro = recut(build, micro)
        work.append(build.place(build, micro))
    sweep = build.passes(build, index)[0]
    taken = sweep.micros(work)
    for enrich in build.enrich:
        taken = enrich(build, taken)
    targets = torch.stack([(m.targets_BT != IGNORED).sum() for m in taken]).sum().float()
    scale, factor = 1.0 / targets.clamp(min=1), build.loss_scale(build)
    build.engine(build, taken, sweep.objective, scale if factor is None else scale * factor)


@contextmanager
def _as_it_was(build: Build, index: int) -> Iterator[None]:
    """Hold the step's values and run without compiled code; put everything back afterwards."""
    parameters = list(build.model.parameters())
    gradients, now = [p.grad for p in parameters], build.now
    devices = [build.device] if build.device.type == "cuda" else []
    phases, build.phases = build.phases, Unwatched()
    build.now = {name: value(index) for name, value in build.values.items()}
    try:
        with torch.random.fork_rng(devices), torch.compiler.set_stance("force_eager"):
            for parameter in parameters:
                parameter.grad = None
            yield
    finally:
        build.now, build.phases = now, phases
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient


@contextmanager
def _hooks(build: Build, sources: list[NonFiniteSource]) -> Iterator[None]:
    """Look at every module's output and every parameter's gradient; the first source counts."""

    def look(name: str, module: nn.Module) -> Any:
        def hook(_: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            if not sources and (wild := _wild(output)) is not None:
                kind, given = type(module).__name__, _largest(_floats((args, kwargs)))
                sources.append(NonFiniteSource(Where.MODULE, name, _dtype(wild), given, kind))

        return module.register_forward_hook(hook, with_kwargs=True)

    def watch(name: str, parameter: nn.Parameter) -> Any:
        def hook(p: Tensor) -> None:
            if not sources and (wild := _wild(p.grad)) is not None:
                largest = _largest([wild])
                sources.append(NonFiniteSource(Where.GRADIENT, name, _dtype(wild), largest))

        return parameter.register_post_accumulate_grad_hook(hook)

    frees = any(getattr(o, "frees_gradients", False) for o in build.optimizers.values())
    with ExitStack() as stack:
        for name, module in build.model.named_modules():
            stack.callback(look(name, module).remove)
        for name, parameter in build.model.named_parameters():
            if parameter.requires_grad and not frees:
                stack.callback(watch(name, parameter).remove)
        if frees:  # a backward pass would update the weights
            stack.enter_context(torch.no_grad())
        yield


def _floats(tree: Any) -> list[Tensor]:
    """Return the floating-point tensors in a structure."""
    return [t for t in tree_iter(tree) if isinstance(t, Tensor) and t.is_floating_point()]


def _wild(tree: Any) -> Tensor | None:
    """Return the first tensor in a structure that holds a number which is not finite."""
    return next((t for t in _floats(tree) if not bool(torch.isfinite(t).all())), None)


def _largest(tensors: list[Tensor]) -> float:
    """Return the largest finite absolute number in tensors; 0 where there is none."""
    sizes = [0.0]
    for tensor in tensors:
        finite = tensor.detach().float().nan_to_num(nan=0.0, posinf=0.0, neginf=0.0)
        sizes += [float(finite.abs().max())] if finite.numel() else []
    return max(sizes)


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")

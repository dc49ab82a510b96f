"""Save and restore the state of a Build, by global names that do not depend on the layout.

Tensors: `model/NAME`, `optimizer/NAME/KEY`, `technique/WHO/NAME`.
Values: counters, the stream's position and hash, each rank's random state, and fingerprints of data
and tokenizer.
"""

import math
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.command import train_command
from headrace.core.errors import Diverged, HeadraceError, RunError
from headrace.core.folders import refetch_command
from headrace.model.adapter import stored_weights
from headrace.parallel.boxes import TensorPart, piece_of
from headrace.plan.gentler import gentler
from headrace.train.checkpoint import Saved, steps_in
from headrace.train.goal import Counters
from headrace.train.identity import (
    WROTE,
    Differences,
    among,
    check_frozen,
    check_same_run,
    differences,
    format_changes,
    note_frozen,
    trained,
)


def tensors(build: Build) -> dict[str, TensorPart]:
    """Return this rank's piece of every tensor of the run's state, by global name."""
    pieces = {f"model/{n}": _piece(build, n, p) for n, p in trained(build)}
    for route, optimizer in build.optimizers.items():
        for name, parameter in build.routed[route].items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    pieces[f"optimizer/{name}/{key}"] = _piece(build, name, value)
    for who, keeper in build.state.items():
        for name, tensor in keeper.tensors().items():
            pieces[f"technique/{who}/{name}"] = _piece(build, _weight(name), tensor)
    return pieces


def _piece(build: Build, name: str, tensor: Tensor) -> TensorPart:
    """Return this rank's piece of a tensor that belongs to the parameter `name`, if there is one.

    A tensor that differs from the parameter only in its last dimension, as scales of blocks do, is
    laid out over the ranks as the parameter is.
    """
    layout = build.layouts.get(name)
    if layout is not None and tensor.ndim == len(layout.shape) > 1:
        local = layout.offsets(build.world)[1]
        if tensor.shape[:-1] == local[:-1] and tensor.size(-1) != local[-1]:
            cuts = [axis for axis, dim in layout.split.items() if dim == tensor.ndim - 1]
            last = tensor.size(-1) * prod(build.world.size(axis) for axis in cuts)
            layout = replace(layout, shape=(*layout.shape[:-1], last))
    return piece_of(tensor, build.world, layout)


def values(build: Build, counters: dict[str, Any]) -> dict[str, Any]:
    """Return every JSON value of the run's state."""
    return {
        "counters": counters,
        "plan": build.plan.dump(),
        "fingerprint": build.prepared.fingerprint,
        "frozen": note_frozen(build),
        "techniques": {who: keeper.values() for who, keeper in build.state.items()},
        "exact": [t.name() for t in build.techniques if t.equality == "exact"],
        "rank": {"rng": _rng(build.device)},
    }


def restore(build: Build, saved: Saved) -> dict[str, Any]:
    """Fill the build from a checkpoint, whatever layout wrote it, and return its counters.

    Raises:
        ConfigError: the data, the tokenizer, the mixture or the plan is not the saved run's.
        RunError: the checkpoint is damaged.
    """
    check_same_run(saved, build)
    check_frozen(saved, build.plan, note_frozen(build))
    _check_names(build, saved)
    for name, parameter in trained(build):
        saved.fill_(f"model/{name}", _piece(build, name, parameter))
    _check_numbers(build, saved)
    restore_state(build, saved)
    own = f"rank-{build.world.rank:05d}.safetensors"
    for part in (part for part in saved.parts if part["file"] == own):
        try:
            _set_rng(part["rank_values"]["rng"], build.device)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise saved.damaged(f"the state of its random numbers is none ({error})") from None
    return saved.values["counters"]


def stream_of(build: Build) -> dict[str, Any]:
    """Return the stream's position and the hash of the rows that all ranks have read."""
    loader, world = build.loader, build.world
    reads = all(world.place(axis) == 0 for axis in ("pipeline", "context", "tensor"))
    loader.merge(sum(world.gather(loader.local_hash if reads else 0)))
    return loader.state()


def restore_state(build: Build, saved: Saved) -> None:
    """Fill the state of every optimizer and of every technique from a checkpoint.

    Raises:
        RunError: the checkpoint is damaged.
    """
    for route, optimizer in build.optimizers.items():
        _restore_optimizer(build, optimizer, build.routed[route], saved)
    restore_techniques(build, saved)


def restore_techniques(build: Build, saved: Saved) -> None:
    """Fill the state of every technique from a checkpoint.

    A technique that was switched on since starts afresh. So does one whose knobs were changed since
    so that it keeps other tensors now.

    Raises:
        RunError: the checkpoint is damaged.
    """
    changes = differences(saved, build.plan, of=WROTE)
    for who, keeper in build.state.items():
        if who not in saved.values["techniques"]:
            continue
        pieces = {
            f"technique/{who}/{name}": _piece(build, _weight(name), tensor)
            for name, tensor in keeper.tensors().items()
        }
        knobs = {key: pair for key, pair in changes.items() if among(key, [f"techniques.{who}"])}
        if knobs and _keeps_others(build, saved, f"technique/{who}/", pieces):
            build.note_line(f"the state of {who} starts afresh, for {format_changes(knobs)}")
            continue
        for name, piece in pieces.items():
            saved.fill_(name, piece)
        keeper.load_values(saved.values["techniques"][who])


def _keeps_others(
    build: Build, saved: Saved, prefix: str, pieces: Mapping[str, TensorPart]
) -> bool:
    """Return whether the ranks keep other tensors of a technique now than a checkpoint has.

    Args:
        build: the run.
        saved: the checkpoint.
        prefix: what the names of the technique's tensors begin with.
        pieces: this rank's tensors of the technique, by name.
    """
    own = {name: [[*piece.shape], str(piece.local.dtype)] for name, piece in pieces.items()}
    now = {name: kind for rank in build.world.gather(own) for name, kind in rank.items()}
    before = {}
    for name in saved.names_under(prefix):
        shape, dtype = saved.shape_of(name)
        before[name] = [[*shape], str(dtype)]
    return now != before


def _weight(name: str) -> str:
    """Return the parameter that a technique's tensor lies as: its name, up to a `#`."""
    return name.partition("#")[0]


def _check_numbers(build: Build, saved: Saved) -> None:
    """Refuse restored weights that are NaN or infinite.

    Raises:
        RunError: names the first tensor, and the newest earlier checkpoint that is sound.
    """
    parts = {name: _piece(build, name, parameter).local for name, parameter in trained(build)}
    refuse_wild(saved, parts, lambda sound: saved.instead([] if sound is None else [sound]))


def refuse_wild(
    saved: Saved, parts: Mapping[str, Tensor], mend: Callable[[int | None], str]
) -> None:
    """Refuse weights that are NaN or infinite, which no learning rate repairs.

    Args:
        saved: the checkpoint.
        parts: the weights that were read from it, by name.
        mend: returns the remedy, given the newest earlier step whose weights are finite.

    Raises:
        RunError: names the first tensor, and whether there is a sound checkpoint.
    """
    parts = {name: part for name, part in parts.items() if part.is_floating_point()}
    if not parts:
        return
    wrong = torch.stack([(~torch.isfinite(part)).sum() for part in parts.values()]).tolist()
    nonfinite = [(name, count) for name, count in zip(parts, wrong, strict=True) if count]
    if not nonfinite:
        return
    (name, count), sound = nonfinite[0], last_sound(saved)
    verdict = "no earlier one is sound" if sound is None else f"step-{sound} is sound"
    raise RunError(
        f"{saved.path} holds weights that are NaN or infinite: {count:,} numbers of "
        f"{parts[name].numel():,} in model/{name}, and some in {len(nonfinite) - 1} other tensors; "
        f"{verdict}",
        mend(sound),
    )


def last_sound(saved: Saved, works: Callable[[Saved], bool] | None = None) -> int | None:
    """Return the newest earlier step of the run whose weights can be read and are finite.

    Args:
        saved: the checkpoint that is not sound.
        works: tests whether a checkpoint with finite weights is usable; a HeadraceError also means
            that it is not. Without it all such checkpoints are usable.
    """
    root, step = saved.path.parent, int(saved.values["step"])
    for earlier in reversed([n for n in steps_in(root) if n < step]):
        with suppress(HeadraceError):
            candidate = Saved(root / f"step-{earlier}")
            numbers = all(bool(torch.isfinite(whole).all()) for _, whole in weights_of(candidate))
            if numbers and (works is None or works(candidate)):
                return earlier
    return None


def diverged(
    build: Build,
    counters: Counters,
    saved: Sequence[int],
    folder: Path,
    *,
    at: int,
    message: str,
    other: str = "",
) -> Diverged:
    """Return the error that ends a run whose loss is not finite, with a command as its remedy.

    The command continues from the last checkpoint after which a validation was better than a
    uniform guess, with gentler settings. A checkpoint of the very weights that gave the loss is not
    sound, whatever was measured of it: the same weights and data give the same loss. Where no
    update was applied to pretrained weights, no learning rate helps, and the remedy says so.

    Args:
        build: the run.
        counters: how far it came; its skipped steps include the one that ends it.
        saved: the steps of its checkpoints.
        folder: the folder of the run.
        at: the number of steps after which the weights had their present values.
        message: which number is not finite.
        other: another remedy that may help.
    """
    plan = build.plan
    if plan.model.pretrained and at < counters.skipped_steps:  # that is, all were skipped
        given = Path(plan.model.pretrained)
        command = f"{refetch_command(given)}; or model.pretrained=FOLDER of others"
        return Diverged(
            f"{message}; no step has changed the weights of model.pretrained = {str(given)!r} yet, "
            f"so no learning rate is at fault{_largest_in(lambda: stored_weights(given))}",
            f"{other}; or {command}" if other else command,
        )
    if at in saved:
        path = folder / "checkpoints" / f"step-{at}"
        message += f"; {path.name} holds these weights"
        message += _largest_in(lambda: weights_of(Saved(path)))
    guess = math.log(build.prepared.tokenizer.vocab)
    learned = max((one["step"] for one in counters.val if one["loss_nats"] < guess), default=-1)
    sound = [f"step-{step}" for step in saved if step <= learned and step < at]
    words = [shlex.quote(word) for word in gentler(plan)]
    if sound:
        verdict = f"{sound[-1]} is the last checkpoint known to be sound"
        words = ["--resume", "--checkpoint", sound[-1], *words]
    else:
        verdict = "no checkpoint is known to be sound"
        words = [f"name={plan.name}-again", *words]
    command = train_command(folder, *words)
    return Diverged(f"{message}; {verdict}", f"{command}{other and f' (or {other})'}")


def _largest_in(read: Callable[[], Iterable[tuple[str, Tensor]]]) -> str:
    """Return words for the largest number of stored weights; "" where they cannot be read."""
    try:
        name, size = largest(read())
    except HeadraceError:
        return ""
    return f"; the largest number in them is {size:.3g}, in {name}"


def weights_of(saved: Saved) -> Iterator[tuple[str, Tensor]]:
    """Yield the floating-point weights of a checkpoint one by one, each with the model's name."""
    for name in saved.names_under("model/"):
        shape, dtype = saved.shape_of(name)
        if dtype.is_floating_point:
            whole = torch.empty(shape, dtype=dtype)
            saved.fill_(name, whole)
            yield name.removeprefix("model/"), whole


def largest(weights: Iterable[tuple[str, Tensor]]) -> tuple[str, float]:
    """Return the name of the tensor with the largest absolute number, and that absolute number.

    Args:
        weights: finite tensors with their names; at least one is not empty.
    """
    sizes = {name: float(whole.abs().max()) for name, whole in weights if whole.numel()}
    name = max(sizes, key=lambda name: sizes[name])
    return name, sizes[name]


def _check_names(build: Build, saved: Saved) -> None:
    """Refuse a checkpoint with tensors that the run has on none of its pipeline stages.

    Raises:
        RunError: names the first such tensor.
    """
    known = {f"model/{name}" for name, _ in trained(build)}
    states = tuple(f"optimizer/{name}/" for named in build.routed.values() for name in named)
    names = [n for n in sorted(saved.names()) if n.partition("/")[0] != "technique"]
    ours = [n in known if n.startswith("model/") else n.startswith(states) for n in names]
    stage_counts = build.world.sum_(
        torch.tensor(ours, device=build.device).float(), "pipeline"
    ).tolist()
    if strange := [name for name, stages in zip(names, stage_counts, strict=True) if not stages]:
        raise saved.damaged(f"it holds {strange[0]}, which this run does not have")


ADAM = frozenset({"step", "exp_avg", "exp_avg_sq"})
"""Keys of the state that torch's AdamW keeps for each parameter."""


def _state_names(optimizer: Any) -> frozenset[str] | None:
    """Return the keys of the state that each parameter has; None where an optimizer has options."""
    is_adam = type(optimizer) is torch.optim.AdamW
    return ADAM if is_adam else getattr(optimizer, "state_names", None)


def _check_adam(name: str, whole: tuple[int, ...], own: torch.dtype, saved: Saved) -> None:
    """Refuse the state of AdamW where a part has another shape or type.

    Args:
        name: the parameter.
        whole: its global shape.
        own: its type.
        saved: the checkpoint.

    Raises:
        RunError: names the part.
    """
    for full in saved.names_under(f"optimizer/{name}/"):
        wanted = ((), torch.float32) if full.endswith("/step") else (whole, own)
        if (stored := saved.shape_of(full)) != wanted:
            raise saved.damaged(
                f"{full} is {wanted[1]} {wanted[0]}; it holds {stored[1]} {stored[0]}"
            )


def _restore_optimizer(
    build: Build, optimizer: Any, named: Mapping[str, torch.nn.Parameter], saved: Saved
) -> None:
    """Create the state tensors of each parameter and fill them from a checkpoint.

    A parameter that another optimizer takes since knobs were changed starts afresh.
    """
    wanted, other = _state_names(optimizer), 0
    for name, parameter in named.items():
        prefix = f"optimizer/{name}/"
        kept = {full.removeprefix(prefix) for full in saved.names_under(prefix)}
        if kept and wanted and kept != wanted:
            if not _rerouted(build, saved):
                odd = ", ".join(f"{prefix}{key}" for key in sorted(kept ^ wanted))
                raise saved.damaged(f"{odd}: missing, or no state of {type(optimizer).__name__}")
            other += 1
        else:
            _restore_parameter(build, optimizer, name, parameter, saved)
    if other:
        changes = format_changes(_rerouted(build, saved))
        build.note_line(f"the optimizer's state of {other} weights starts afresh, for {changes}")


def _rerouted(build: Build, saved: Saved) -> Differences:
    """Return the changed knobs of techniques that say which optimizer takes a weight."""
    routing = [f"techniques.{t.name()}" for t in build.techniques if "routes" in t.composes]
    changes = differences(saved, build.plan, of=WROTE)
    return {key: pair for key, pair in changes.items() if among(key, routing)}


def _restore_parameter(
    build: Build, optimizer: Any, name: str, parameter: torch.nn.Parameter, saved: Saved
) -> None:
    """Create the state tensors of one parameter and fill them from a checkpoint."""
    prefix, layout = f"optimizer/{name}/", build.layouts[name]
    whole = tuple(layout.shape)
    if type(optimizer) is torch.optim.AdamW:
        _check_adam(name, whole, parameter.dtype, saved)
    for full in saved.names_under(prefix):
        shape, dtype = saved.shape_of(full)
        if shape == whole:
            value = torch.zeros_like(parameter, dtype=dtype)
        else:
            if shape[:-1] == whole[:-1] and len(shape) > 1:
                _, shape = replace(layout, shape=shape).offsets(build.world)
            value = torch.zeros(shape, dtype=dtype, device=parameter.device)
        saved.fill_(full, _piece(build, name, value))
        optimizer.state[parameter][full.removeprefix(prefix)] = value


def _rng(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {kind: bytes(state.tolist()).hex() for kind, state in states.items()}


def _set_rng(states: Mapping[str, str], device: torch.device) -> None:
    def tensor(text: str) -> Tensor:
        return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["cpu"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(tensor(states["cuda"]), device)

"""What of a Build is kept in a checkpoint, by global names that no layout changes.

Tensors: `model/NAME`, `optimizer/NAME/KEY`, `technique/WHO/NAME`.
Values: counters, the stream's place and hash, each rank's RNG, fingerprints of data and tokenizer.
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
from headrace.core.folders import fetched_again
from headrace.model.adapter import stored_weights
from headrace.parallel.boxes import TensorPart, piece_of
from headrace.plan.gentler import gentler
from headrace.train.checkpoint import Saved, steps_in
from headrace.train.goal import Counters
from headrace.train.identity import check_frozen, check_same_run, note_frozen, trained


def tensors(build: Build) -> dict[str, TensorPart]:
    """This rank's piece of every tensor of the run's state, by global name."""
    found = {f"model/{n}": _piece(build, n, p) for n, p in trained(build)}
    for route, optimizer in build.optimizers.items():
        for name, parameter in build.routed[route].items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{name}/{key}"] = _piece(build, name, value)
    for who, keeper in build.state.items():
        for name, tensor in keeper.tensors().items():
            found[f"technique/{who}/{name}"] = _piece(build, name, tensor)
    return found


def _piece(build: Build, name: str, tensor: Tensor) -> TensorPart:
    """A tensor that belongs to parameter `name`, or to none of that name.

    One that differs from it in the last dimension alone, as scales of blocks do, lies as it does.
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
    """Every JSON value of the run's state."""
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
    """Fill the build from a checkpoint, whatever layout wrote it; returns its counters.

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
    for route, optimizer in build.optimizers.items():
        _restore_optimizer(build, optimizer, build.routed[route], saved)
    for who, keeper in build.state.items():
        if who not in saved.values["techniques"]:
            continue  # an exact technique that was switched on: it begins here
        for name, tensor in keeper.tensors().items():
            saved.fill_(f"technique/{who}/{name}", _piece(build, name, tensor))
        keeper.load_values(saved.values["techniques"][who])
    if build.world.rank < len(saved.parts):
        try:
            _set_rng(saved.parts[build.world.rank]["rank_values"]["rng"], build.device)
        except (RuntimeError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise saved.damaged(f"the state of its random numbers is none ({error})") from None
    return saved.values["counters"]


def _check_numbers(build: Build, saved: Saved) -> None:
    """Refuse weights that are no numbers.

    Raises:
        RunError: names the first tensor, and the newest checkpoint before that is sound.
    """
    parts = {name: _piece(build, name, parameter).local for name, parameter in trained(build)}
    refuse_wild(saved, parts, lambda sound: saved.instead([] if sound is None else [sound]))


def refuse_wild(
    saved: Saved, parts: Mapping[str, Tensor], mend: Callable[[int | None], str]
) -> None:
    """Refuse weights that are no numbers, which no learning rate mends.

    Args:
        saved: the checkpoint.
        parts: the weights that were read of it, by name.
        mend: the remedy, given the newest earlier step whose weights are numbers.

    Raises:
        RunError: names the first tensor, and whether there is a sound checkpoint.
    """
    parts = {name: part for name, part in parts.items() if part.is_floating_point()}
    if not parts:
        return
    wrong = torch.stack([(~torch.isfinite(part)).sum() for part in parts.values()]).tolist()
    found = [(name, count) for name, count in zip(parts, wrong, strict=True) if count]
    if not found:
        return
    (name, count), sound = found[0], last_sound(saved)
    told = "no earlier one is sound" if sound is None else f"step-{sound} is sound"
    raise RunError(
        f"{saved.path} holds weights that are NaN or infinite: {count:,} numbers of "
        f"{parts[name].numel():,} in model/{name}, and some in {len(found) - 1} other tensors; "
        f"{told}",
        mend(sound),
    )


def last_sound(saved: Saved, works: Callable[[Saved], bool] | None = None) -> int | None:
    """Return the newest earlier step of the run whose weights can be read and are numbers.

    Args:
        saved: the checkpoint that is not sound.
        works: says of a checkpoint whose weights are numbers whether they are of use, where a
            HeadraceError says that they are not; all are without it.
    """
    root, step = saved.path.parent, int(saved.values["step"])
    for earlier in reversed([n for n in steps_in(root) if n < step]):
        with suppress(HeadraceError):
            found = Saved(root / f"step-{earlier}")
            numbers = all(bool(torch.isfinite(whole).all()) for _, whole in weights_of(found))
            if numbers and (works is None or works(found)):
                return earlier
    return None


def diverged(
    build: Build, counters: Counters, saved: Sequence[int], folder: Path, *, at: int, message: str,
    other: str = "",
) -> Diverged:  # fmt: skip
    """Return what ends a run of which a number is none: what is left, and the command that learns.

    It goes on from the last checkpoint after which a validation was better than a uniform guess.
    The one with the very weights of which the number is none is not sound, whatever was measured
    of it: the same weights and rows give the same again. Where no update was applied to given
    weights, no rate mends them.

    Args:
        build: the run.
        counters: how far it came; its skipped steps include the one that ends it.
        saved: steps of its checkpoints.
        folder: its own.
        at: steps after which the weights are as they were then.
        message: what is no number.
        other: what may help as well.
    """
    plan = build.plan
    if plan.model.pretrained and at < counters.skipped_steps:  # that is, all were skipped
        given = Path(plan.model.pretrained)
        command = f"{fetched_again(given)}; or model.pretrained=FOLDER of others"
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
        told = f"{sound[-1]} is the last checkpoint known to be sound"
        words = ["--resume", "--checkpoint", sound[-1], *words]
    else:
        told = "no checkpoint is known to be sound"
        words = [f"name={plan.name}-again", *words]
    command = train_command(folder, *words)
    return Diverged(f"{message}; {told}", f"{command}{other and f' (or {other})'}")


def _largest_in(read: Callable[[], Iterable[tuple[str, Tensor]]]) -> str:
    """Say how large the numbers of stored weights are; "" where they cannot be read."""
    try:
        name, size = largest(read())
    except HeadraceError:
        return ""
    return f"; the largest number in them is {size:.3g}, in {name}"


def weights_of(saved: Saved) -> Iterator[tuple[str, Tensor]]:
    """Read the floating-point weights of a checkpoint one by one: each with the model's name."""
    for name in saved.names_under("model/"):
        shape, dtype = saved.shape_of(name)
        if dtype.is_floating_point:
            whole = torch.empty(shape, dtype=dtype)
            saved.fill_(name, whole)
            yield name.removeprefix("model/"), whole


def largest(weights: Iterable[tuple[str, Tensor]]) -> tuple[str, float]:
    """Return the tensor with the number that is farthest from zero, and that number's size.

    Args:
        weights: finite tensors by name, one at least that is not empty.
    """
    sizes = {name: float(whole.abs().max()) for name, whole in weights if whole.numel()}
    name = max(sizes, key=lambda name: sizes[name])
    return name, sizes[name]


def _check_names(build: Build, saved: Saved) -> None:
    """Refuse a checkpoint with tensors that the run does not have, on whatever stage.

    Raises:
        RunError: names the first.
    """
    known = {f"model/{name}" for name, _ in trained(build)}
    states = tuple(f"optimizer/{name}/" for named in build.routed.values() for name in named)
    names = [n for n in sorted(saved.names()) if n.partition("/")[0] != "technique"]
    ours = [n in known if n.startswith("model/") else n.startswith(states) for n in names]
    held = build.world.sum_(torch.tensor(ours, device=build.device).float(), "pipeline").tolist()
    if strange := [name for name, stages in zip(names, held, strict=True) if not stages]:
        raise saved.damaged(f"it holds {strange[0]}, which this run does not have")


ADAM = {"step", "exp_avg", "exp_avg_sq"}
"""The state of a parameter that torch's AdamW updates."""


def _check_adam(name: str, whole: tuple[int, ...], own: torch.dtype, saved: Saved) -> None:
    """Refuse the state of AdamW that lacks a part, or has one of another shape or type.

    Raises:
        RunError: names it.
    """
    prefix = f"optimizer/{name}/"
    kept = {full.removeprefix(prefix) for full in saved.names_under(prefix)}
    if kept and kept != ADAM:
        odd = [f"{prefix}{key}" for key in sorted(kept ^ ADAM)]
        raise saved.damaged(f"{', '.join(odd)}: missing, or no state of AdamW")
    for key in kept:
        wanted = ((), torch.float32) if key == "step" else (whole, own)
        if (found := saved.shape_of(f"{prefix}{key}")) != wanted:
            raise saved.damaged(f"{prefix}{key} is {wanted[1]} {wanted[0]}; it holds "
                                f"{found[1]} {found[0]}")  # fmt: skip


def _restore_optimizer(
    build: Build, optimizer: Any, named: Mapping[str, torch.nn.Parameter], saved: Saved
) -> None:
    """Recreate each parameter's state tensors and fill them."""
    for name, parameter in named.items():
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

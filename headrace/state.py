"""What of a Build is kept in a checkpoint, by global names that no layout changes.

Tensors: `model/NAME`, `optimizer/NAME/KEY`, `technique/WHO/NAME`.
Values: counters, the stream's place and hash, each rank's RNG, fingerprints of data and tokenizer.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.build import NOT_OF_WEIGHTS
from headrace.changes import word
from headrace.checkpoint import Saved
from headrace.core.errors import ConfigError
from headrace.core.plan import Plan
from headrace.core.technique import Technique
from headrace.data.prepared import check_same_data
from headrace.model.adapter import weights_digest
from headrace.parallel.boxes import Piece, piece_of
from headrace.sockets import Build

FROZEN = "frozen"
"""The note under which a Build has the digests of weights that no checkpoint holds."""
MUST_STAY = (
    "seed", "model", "batch.tokens",
    "data.sources", "data.weights", "data.validation", "data.text_key", "data.tokenizer",
    "data.vocab", "data.sequence_length",
)  # fmt: skip
"""Plan keys that a resume may not change: they would make it another run."""


def tensors(build: Build) -> dict[str, Piece]:
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


def _piece(build: Build, name: str, tensor: Tensor) -> Piece:
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


def trained(build: Build) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """What is saved of the model: a frozen weight is a pure function of the source and storage."""
    return ((n, p) for n, p in build.model.named_parameters() if p.requires_grad)


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
    check_same_run(saved.values, build.plan, build.prepared.fingerprint)
    check_frozen(saved.values, build.plan, note_frozen(build))
    for name, parameter in trained(build):
        saved.fill_(f"model/{name}", _piece(build, name, parameter))
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


def check_same_run(
    saved: Mapping[str, Any], plan: Plan, fingerprint: Mapping[str, str], *, fork: bool = False
) -> None:
    """Refuse to continue another run's checkpoint, naming what differs.

    A fork may change what `changed_knobs` names: it is another run.

    Raises:
        ConfigError: with the key or the thing that changed.
    """
    before, after = saved["plan"], plan.dump()
    for key in MUST_STAY:
        old, new = _at(before, key), _at(after, key)
        if old != new:
            if isinstance(old, dict):
                part = next(k for k in sorted({*old, *new}) if old.get(k) != new.get(k))
                key, old, new = f"{key}.{part}", old.get(part), new.get(part)
            remedy = f"{key}={old}" if old is not None else f"leave out {key}"
            raise ConfigError(
                f"cannot resume: {key} was {old!r} and is now {new!r}",
                f"{remedy} (or name=ANOTHER for a new run)",
            )
    exact = {n for n, t in plan.techniques.items() if t.equality == "exact"}
    exact |= set(saved.get("exact", ()))  # they compute what the trunk computes
    switched = {*before.get("techniques", {})} ^ {*after.get("techniques", {})}
    switched = sorted(switched - exact)
    if switched:
        was_on = switched[0] in before.get("techniques", {})
        raise ConfigError(
            f"cannot resume: the technique {switched[0]} was {'on' if was_on else 'off'} "
            "at the checkpoint",
            f"{'--with' if was_on else '--without'} {switched[0]}, or name=ANOTHER for a new run",
        )
    for key, (old, new) in ({} if fork else changed_knobs(saved, plan)).items():
        raise ConfigError(
            f"cannot resume: {key} was {old!r} and is now {new!r}, which changes what is learned",
            f"{key}={word(old)}, or --resume --checkpoint step-{saved['step']} {key}={word(new)} "
            "for a new run that begins there",
        )
    sources = f"data.sources = {', '.join(plan.source_list)}"
    check_same_data(saved["fingerprint"], fingerprint, sources)


def changed_knobs(saved: Mapping[str, Any], plan: Plan) -> dict[str, tuple[Any, Any]]:
    """Return settings of the optimizer and of learning techniques that changed: key -> old, new."""
    before, after = saved["plan"], plan.dump()
    exact = {n for n, t in plan.techniques.items() if t.equality == "exact"}
    exact |= set(saved.get("exact", ()))
    both = {*before.get("techniques", {})} & {*after.get("techniques", {})}
    tables = ["optimizer", *(f"techniques.{name}" for name in sorted(both - exact))]
    found = {}
    for table in tables:
        had, has = _at(before, table) or {}, _at(after, table) or {}
        for key in sorted(had):
            if had[key] != has.get(key):
                found[f"{table}.{key}"] = had[key], has.get(key)
    return found


def reads_base(techniques: Iterable[Technique[Any]]) -> bool:
    """Return whether a run reads the weights of `model.pretrained` after it has begun.

    Frozen weights are in no checkpoint, and a teacher may be the run's own first weights.
    """
    return any("frozen" in t.composes or "" in t.reads().values() for t in techniques)


def _folders_read(plan: Plan) -> dict[str, str]:
    """Return the folders of weights that a run reads and no checkpoint holds, by the plan's key."""
    folders = {
        f"techniques.{name}.{knob}": folder
        for name, technique in plan.techniques.items()
        for knob, folder in technique.reads().items()
        if folder
    }
    if plan.model.pretrained and reads_base(plan.techniques.values()):
        folders["model.pretrained"] = plan.model.pretrained
    return folders


def frozen_digests(plan: Plan) -> dict[str, str]:
    """Return the digest of every folder of weights that the run reads and no checkpoint holds."""
    return {key: weights_digest(Path(folder)) for key, folder in _folders_read(plan).items()}


def without_base(plan: Plan, saved: Mapping[str, Any]) -> Plan:
    """Return a run's plan as its checkpoint alone can make its model, weights and all.

    The shape is the checkpoint's. Where the plan says otherwise it stays so, to be refused by
    `check_same_run`; how random weights begin says nothing of a model that was loaded. A run that
    reads the folder of `model.pretrained` still keeps its plan.

    Args:
        plan: the run that goes on.
        saved: the values of its checkpoint.

    Raises:
        ConfigError: a folder of weights that no checkpoint holds is gone.
    """
    for key, folder in _folders_read(plan).items():
        if not Path(folder).is_dir():
            digest = (saved.get("frozen") or {}).get(key, "")
            raise ConfigError(
                f"{key} = {folder!r} is gone, and the checkpoints of this run hold only what was "
                f"trained beside its weights{f' (sha256 {digest[:12]})' * bool(digest)}",
                f"put the weights back into {folder}",
            )
    if not plan.model.pretrained or reads_base(plan.techniques.values()):
        return plan
    free = {*NOT_OF_WEIGHTS} - {"family", "precision"}
    said = {key: getattr(plan.model, key) for key in plan.model.model_fields_set - free}
    return plan.replaced(model={**saved["plan"]["model"], **said, "pretrained": ""})


def note_frozen(build: Build) -> dict[str, str]:
    """Read the digests once, when the weights themselves are read; every checkpoint keeps them."""
    if FROZEN not in build.notes:
        build.notes[FROZEN] = frozen_digests(build.plan)
    return build.notes[FROZEN]


def check_frozen(saved: Mapping[str, Any], plan: Plan, found: Mapping[str, str]) -> None:
    """Refuse weights that are not those which a checkpoint was trained beside.

    A checkpoint of before has no digest of them, and is taken as it is.

    Raises:
        ConfigError: with the key, and both digests.
    """
    was = saved.get("frozen") or {}
    for key, now in found.items():
        if was.get(key, now) != now:
            folder = _at(plan.dump(), key)
            raise ConfigError(
                f"{key} = {folder!r} holds other weights than the run was trained with "
                f"(sha256 {was[key][:12]} -> {now[:12]})",
                f"put the weights back into {folder}, or name=ANOTHER for a new run",
            )


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _restore_optimizer(
    build: Build, optimizer: Any, named: Mapping[str, torch.nn.Parameter], saved: Saved
) -> None:
    """Recreate each parameter's state tensors and fill them."""
    for name, parameter in named.items():
        prefix, layout = f"optimizer/{name}/", build.layouts[name]
        whole = tuple(layout.shape)
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

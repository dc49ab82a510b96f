"""Compare a run's plan, data and frozen weights with those that a checkpoint recorded.

`--resume`, `eval`, `sample`, `export` and `report` make this comparison. They use what agrees and
refuse what does not, with a message that has the key, both values and the command that goes on.
"""

import shlex
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel

from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.build import NOT_OF_WEIGHTS
from headrace.assemble.sockets import Build
from headrace.core.command import rerun_train
from headrace.core.errors import ConfigError
from headrace.data import mixture
from headrace.data.prepared import check_same_data
from headrace.model.adapter import load_pretrained, weights_digest
from headrace.model.peft import adapter_digest
from headrace.model.rms_conversion import as_asked
from headrace.plan.changes import flatten, override, rewritten, word
from headrace.plan.plan import Plan
from headrace.plan.technique import Technique, installed
from headrace.train.checkpoint import Saved

ADAPTER = "model.adapter"
NO_FOLDERS = {"pretrained": "", "adapter": ""}
"""Keys of a model whose checkpoint holds all of its weights."""
MUST_STAY = (
    "seed",
    "model",
    "vision.architecture",
    "vision.source",
    "vision.classes",
    "vision.size",
    "vision.images",
    "vision.validation_images",
    "vision.noise",
    "vision.stem_stride",
    "vision.channels",
    "batch.tokens",
    "data.sources",
    "data.weights",
    "data.mixture",
    "data.validation",
    "data.text_key",
    "data.text_template",
    "data.separator",
    "data.invalid_utf8",
    "data.deduplication",
    "data.decontamination",
    "data.tokenizer",
    "data.vocab",
    "data.sequence_length",
    "data.curriculum",
    "data.chat",
)
"""Plan keys that a resumed run may not change, because they would make it another run."""
HORIZON = ("goal.steps", "goal.tokens", "schedule.steps")
"""Plan keys that move the borders of a mixture's stages where these are shares of the horizon."""
SCHEDULED = "schedule"
"""Room of the techniques that a branch may switch: they say what is to come, and keep the model."""
LOCATION_KEYS = ("name", "directory")
"""Plan keys that say where a run is stored; they are not compared."""
WROTE = "written_under"
"""Key of the plan under which the tensors of a checkpoint were written, where a new run begins at
it and "plan" is that run's."""
Differences = dict[str, tuple[Any, Any]]
"""Dotted key -> its value in the checkpoint's plan and its value now; None where it is not set."""


def differences(saved: Saved, plan: Plan, *, of: str = "plan") -> Differences:
    """Return every key by which a plan differs from the plan that a checkpoint was trained with.

    A key that an older version of the plan did not have counts as its default, or as what was in
    force before there was a choice (`Technique.unsaid`). A technique that
    was switched on or off is a key `techniques.NAME`; its values are whether it was on, and is on.

    Args:
        saved: the checkpoint.
        plan: the plan to compare.
        of: the key of the checkpoint's plan; `WROTE` is of the one that wrote its tensors.
    """
    dumped = saved.values.get(of, saved.values["plan"])
    before, after = _complete(dumped, plan), plan.dump()
    had, has = before.pop("techniques", {}), after.pop("techniques", {})
    pairs: Differences = {
        f"techniques.{name}": (name in had, name in has) for name in sorted({*had} ^ {*has})
    }
    before["techniques"] = {name: had[name] for name in had if name in has}
    after["techniques"] = {name: has[name] for name in has if name in had}
    old, new = flatten(before), flatten(after)
    for key in sorted({*old, *new}):
        if key not in LOCATION_KEYS and old.get(key) != new.get(key):
            pairs[key] = old.get(key), new.get(key)
    return pairs


def _complete(dumped: Mapping[str, Any], plan: Plan) -> dict[str, Any]:
    """Return a dumped plan with the defaults of the keys that were added later."""
    tables: list[tuple[str, type[BaseModel]]] = [
        (name, type(table))
        for name in Plan.model_fields
        if isinstance(table := getattr(plan, name), BaseModel)
    ]
    completed = {**dumped}
    for name, kind in tables:
        completed[name] = _with_defaults(kind, dumped.get(name, {}))
    had = dumped.get("techniques", {})
    completed["techniques"] = {
        name: _with_knobs(type(plan.techniques[name]), knobs) if name in plan.techniques else knobs
        for name, knobs in had.items()
    }
    return completed


def _with_knobs(kind: type[Technique[Any]], dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped technique with the knobs that were added later, as they were in force."""
    return _with_defaults(kind, {**kind.unsaid, **dumped})


def _with_defaults(kind: type[BaseModel], dumped: Mapping[str, Any]) -> dict[str, Any]:
    """Return a dumped table with its keys' defaults, and those of the tables in it.

    Defaults of None are left out, as a dumped plan leaves them out.
    """
    completed = {**dumped}
    for key, field in kind.model_fields.items():
        if isinstance(field.default, BaseModel):
            completed[key] = _with_defaults(type(field.default), dumped.get(key, {}))
        elif not field.is_required() and field.default is not None:
            default = list(field.default) if isinstance(field.default, tuple) else field.default
            completed.setdefault(key, default)
    return completed


def format_changes(changes: Differences) -> str:
    """Format changes as one line, as in `goal.steps 12 -> 20`."""
    words = []
    for key, (old, new) in changes.items():
        if _switched(key):
            words.append(f"{'+' if new else '-'}{key.partition('.')[2]}")
        else:
            words.append(f"{key} {_shown(old)} -> {_shown(new)}")
    return ", ".join(words)


def _shown(value: Any) -> str:
    return "none" if value is None else str(value)


def among(key: str, tables: Iterable[str]) -> bool:
    """Return whether a key is one of the given tables or keys, or lies in one of them."""
    return any(key == table or key.startswith(f"{table}.") for table in tables)


def changed_knobs(saved: Saved, plan: Plan) -> Differences:
    """Return the changed settings of the optimizer and of techniques that are not exact."""
    exact = _exact(saved, plan)
    tables = ["optimizer", *(f"techniques.{name}" for name in plan.techniques if name not in exact)]
    return {
        key: pair
        for key, pair in differences(saved, plan).items()
        if among(key, tables) and key not in tables
    }


def _exact(saved: Saved, plan: Plan) -> set[str]:
    """Return the techniques that compute what the plain trainer computes; they may be changed."""
    own = {name for name, technique in plan.techniques.items() if technique.equality == "exact"}
    return own | set(saved.values.get("exact", ()))


def switched_off_course(saved: Saved, plan: Plan, changes: Differences) -> list[str]:
    """Return the switched techniques that a branch may not switch: all but exact and scheduled."""
    free, known = _exact(saved, plan), installed().techniques
    return [
        key
        for key in changes
        if _switched(key)
        and (name := key.split(".")[1]) not in free
        and not (name in known and known[name].room == SCHEDULED)
    ]


def check_same_run(saved: Saved, build: Build, *, fork: bool = False, branch: bool = False) -> None:
    """Refuse to continue the checkpoint of another run.

    A fork is a new run. It may change what `changed_knobs` returns where the weights keep their
    shapes. A branch is a fork that may also switch techniques of the room `schedule`.

    Raises:
        ConfigError: names the key, or the data, that changed.
    """
    plan, run = build.plan, saved.path.parent.parent
    changes, exact = differences(saved, plan), _exact(saved, plan)
    made = rewritten(plan)  # by techniques, which are compared themselves
    fixed = [key for t in MUST_STAY for key in changes if among(key, [t]) and not among(key, made)]
    if not fixed and saved.values["fingerprint"].get("mixture") != mixture.fingerprint(plan):
        fixed = [key for key in HORIZON if key in changes]
    switched = [key for key in changes if _switched(key) and key.split(".")[1] not in exact]
    if branch:
        switched = switched_off_course(saved, plan, changes)
    learned, shapes = changed_knobs(saved, plan), _reshaped(saved, build)
    words = [back(saved, key, changes[key]) for key in (*fixed, *switched, *learned)]
    goes_on = rerun_train(run, "--resume", *words)
    if fixed:
        old, new = changes[fixed[0]]
        reason = f"{fixed[0]} was {old!r} and is now {new!r}"
        if fixed[0] in HORIZON:
            reason += ", which moves the stages of data.mixture that end at a share of the horizon"
    elif switched:
        was = "on" if changes[switched[0]][0] else "off"
        reason = f"the technique {switched[0].split('.')[1]} was {was} at the checkpoint"
    elif learned and (shapes or not fork):
        key, (old, new) = next(iter(learned.items()))
        reason = f"{key} was {old!r} and is now {new!r}, which changes what is learned"
        reason += f": {shapes}" if shapes else ""
    else:
        sources = f"data.sources = {', '.join(plan.source_list)}"
        check_same_data(saved.values["fingerprint"], build.prepared.fingerprint, sources, run)
        return
    also = format_changes({key: changes[key] for key in (*fixed, *switched, *learned)[1:]})
    other = f"{rerun_train(run, 'name=NEW')} for a new run"
    if not fixed and not switched:
        asked = [override(plan.dump(), key) for key in learned]
        begins = "name=NEW" if shapes else f"--resume --checkpoint step-{saved.values['step']}"
        other = f"{rerun_train(run, begins, *asked)} for a new run"
        other += "" if shapes else " that begins there"
    raise ConfigError(
        f"cannot resume: {reason}{f'; also {also}' * bool(also)}", f"{goes_on}; or {other}"
    )


def back(saved: Saved, key: str, pair: tuple[Any, Any]) -> str:
    """Return the words to type after a plan so that a key is as it was at a checkpoint."""
    if _switched(key) and not pair[0]:
        return f"--without {key.split('.')[1]}"
    if pair[0] is not None and not _switched(key):  # also where the saved plan does not say it
        return shlex.quote(f"{key}={word(pair[0])}")
    return override(saved.values["plan"], key)


def _switched(key: str) -> bool:
    """Return whether a key of `differences` is that of a technique switched on or off."""
    return key.startswith("techniques.") and key.count(".") == 1


def _reshaped(saved: Saved, build: Build) -> str:
    """Return words for a weight with another shape than at a checkpoint; "" where there is none."""
    stored_names = saved.names()
    for name, _ in trained(build):
        if name not in build.layouts:
            continue
        full, wanted = f"model/{name}", tuple(build.layouts[name].shape)
        stored_shape = saved.shape_of(full)[0] if full in stored_names else None
        if stored_shape != wanted:
            there = "is not there" if stored_shape is None else f"has shape {stored_shape} there"
            return f"{name} {there}, and {wanted} here"
    return ""


def trained(build: Build) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield the weights that a checkpoint saves, with their names: all that are not frozen.

    A frozen weight depends only on its source and its storage, so it can be made again.
    """
    return ((n, p) for n, p in build.model.named_parameters() if p.requires_grad)


def _back(saved: Saved, key: str) -> str:
    """Return the override that gives a key the value that a checkpoint was trained with."""
    return override(saved.values["plan"], key)


# --- weights that no checkpoint holds ---------------------------------------------------------


def reads_base(techniques: Iterable[Technique[Any]]) -> bool:
    """Return whether a run reads the weights of `model.pretrained` after it has begun.

    Frozen weights are in no checkpoint, and the teacher of a technique may be the run's own first
    weights.
    """
    return any("frozen" in t.composes or "" in t.reads().values() for t in techniques)


def trains_adapters(plan: Plan) -> bool:
    """Return whether the adapters that a run starts from are what it trains."""
    return any(isinstance(technique, AdapterTechnique) for technique in plan.techniques.values())


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
        if plan.model.adapter and not trains_adapters(plan):  # they are in the frozen weights
            folders[ADAPTER] = plan.model.adapter
    return folders


def frozen_digests(plan: Plan) -> dict[str, str]:
    """Return the digest of every folder of weights that the run reads and no checkpoint holds."""
    return {
        key: (adapter_digest if key == ADAPTER else weights_digest)(Path(folder))
        for key, folder in _folders_read(plan).items()
    }


def without_base(plan: Plan, saved: Saved) -> Plan:
    """Return a run's plan so that its model can be made from its checkpoint alone.

    The shape of the model is the checkpoint's, and `model.pretrained` is empty. A key that the plan
    sets to another value keeps it, so that `check_same_run` refuses it; keys of the random
    initialisation do not matter for a loaded model. A run that still reads the folder of
    `model.pretrained` keeps its plan.

    Args:
        plan: the plan of the run that goes on.
        saved: its checkpoint.

    Raises:
        ConfigError: a folder of weights that no checkpoint holds is gone.
    """
    for key, folder in _folders_read(plan).items():
        if not Path(folder).is_dir():
            digest = (saved.values.get("frozen") or {}).get(key, "")
            raise ConfigError(
                f"{key} = {folder!r} is gone, and the checkpoints of this run hold only what was "
                f"trained beside its weights{f' (sha256 {digest[:12]})' * bool(digest)}",
                f"put the weights back into {folder}; or "
                f"{rerun_train(saved.path.parent.parent, 'name=NEW', f'{key}=FOLDER')} for a new "
                "run with others",
            )
    if plan.vision is not None and plan.vision.pretrained:
        bare = plan.vision.model_copy(update={"pretrained": ""})
        return plan if reads_base(plan.techniques.values()) else plan.replaced(vision=bare)
    if not plan.model.pretrained:
        return plan
    if reads_base(plan.techniques.values()):
        _check_shape_of_base(plan, saved)
        if not (plan.model.adapter and trains_adapters(plan)):
            return plan
        # What trains is in the checkpoint.
        return plan.replaced(model=plan.model.model_copy(update={"adapter": ""}))
    free = {*NOT_OF_WEIGHTS} - {"family", "precision"}
    own_values = {key: getattr(plan.model, key) for key in plan.model.model_fields_set - free}
    return plan.replaced(model={**saved.values["plan"]["model"], **own_values, **NO_FOLDERS})


def _check_shape_of_base(plan: Plan, saved: Saved) -> None:
    """Refuse a folder whose config.json no longer describes the model of the checkpoint.

    Raises:
        ConfigError: names the keys and both values.
    """
    folder, was = plan.model.pretrained, saved.values["plan"]["model"]
    current = as_asked(plan.model, load_pretrained(Path(folder))[0])
    keys = [k for k in sorted(plan.model.model_fields_set - NOT_OF_WEIGHTS) if k in was]
    changed = [k for k in keys if getattr(plan.model, k) == was[k] != getattr(current, k)]
    if changed:
        now = [f"model.{k}={getattr(current, k)}" for k in changed]
        each = ", ".join(f"model.{k} {was[k]!r} -> {getattr(current, k)!r}" for k in changed)
        raise ConfigError(
            f"{Path(folder) / 'config.json'} changed since the run was trained ({each})",
            f"put the config.json of then back into {folder}; or "
            f"{rerun_train(saved.path.parent.parent, 'name=NEW', *now)} for a new run with this",
        )


def note_frozen(build: Build) -> dict[str, str]:
    """Return the digests of frozen weights, read once per run; every checkpoint keeps them."""
    if build.run_notes.frozen is None:
        build.run_notes.frozen = frozen_digests(build.plan)
    return build.run_notes.frozen


def check_frozen(saved: Saved, plan: Plan, digests: Mapping[str, str]) -> None:
    """Refuse frozen weights that differ from those that a checkpoint was trained with.

    An older checkpoint has no digest of them, and is accepted.

    Args:
        saved: the checkpoint.
        plan: the plan of the run.
        digests: plan key -> digest of the weights that are read now.

    Raises:
        ConfigError: names the key and both digests.
    """
    was, folders = saved.values.get("frozen") or {}, flatten(plan.dump())
    for key, now in digests.items():
        if was.get(key, now) != now:
            folder = folders.get(key)
            raise ConfigError(
                f"{key} = {folder!r} holds other weights than the run was trained with "
                f"(sha256 {was[key][:12]} -> {now[:12]})",
                f"put the weights back into {folder}; or "
                f"{rerun_train(saved.path.parent.parent, 'name=NEW')} for a new run with these",
            )

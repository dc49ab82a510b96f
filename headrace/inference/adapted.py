"""Open a base with one of several adapters, chosen by name: no copy of the base for each.

An adapter is a run that trained one, or a folder in PEFT's format. A run's stands beside the base
as it stood in training, in few bits too; a folder's is added into the weights. Both say by sha256
of which base they are, where Headrace wrote them, and another one is refused; the shapes are all
that a folder of PEFT's own tells.
"""

from pathlib import Path
from typing import Any

from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.sockets import Build
from headrace.core.command import rerun_with, rerun_without
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.data.ingest import reopen
from headrace.data.prepared import Prepared, check_same_data
from headrace.inference.load import checkpoint_of, own_tokenizer, read_plan, shapes_model
from headrace.model.adapter import weights_digest
from headrace.model.peft import CONFIG
from headrace.parallel.world import World
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Stage
from headrace.train.checkpoint import Saved
from headrace.train.identity import trained, trains_adapters
from headrace.train.run_folder import RunFolder

INSIDE = "adapters"
"""The folder inside of a run's folder whose folders are its adapters, by name."""


def resolve_adapter(run: Path, name: str, catalogue: Catalogue) -> Path:
    """Return the folder of an adapter: a path, a name in `RUN/adapters`, or a run's name.

    Raises:
        ConfigError: there is none of this name, or the run of this name trained no adapter.
    """
    places = (Path(name), run / INSIDE / name, Path("runs") / name)
    for folder in places:
        if (folder / CONFIG).is_file():
            return folder
        if (folder / "plan.toml").is_file():
            if trains_adapters(read_plan(folder, catalogue)):
                return folder
            raise ConfigError(
                f"--adapter {name} is a run that trained no adapter", _named(run, catalogue)
            )
    raise ConfigError(
        f"--adapter {name}: there is no {CONFIG} in it, none in {run / INSIDE / name}, and no run "
        "of that name",
        _named(run, catalogue),
    )


def _named(run: Path, catalogue: Catalogue) -> str:
    """Return the remedy that names the adapters which are here."""
    names = sorted(file.parent.name for file in (run / INSIDE).glob(f"*/{CONFIG}"))
    for file in sorted(Path("runs").glob("*/plan.toml")):
        try:
            is_one = trains_adapters(read_plan(file.parent, catalogue))
        except ConfigError:
            continue
        names += [file.parent.name] * is_one
    commands = [rerun_with("--adapter", name, verb=f"sample {shell(run)}") for name in names[:4]]
    return ", or ".join(commands or [rerun_without("--adapter", verb=f"sample {shell(run)}")])


def open_adapted(
    run: Path, base: Path, adapter: Path, catalogue: Catalogue, *, with_data: bool = False
) -> Build:
    """Return a base with an adapter, uncompiled, on this machine's device.

    Args:
        run: the run whose tokenizer and validation text are read.
        base: the folder of its weights.
        adapter: what `resolve_adapter` returned.
        catalogue: the techniques and model families.
        with_data: whether to open the validation set too.

    Raises:
        ConfigError: the adapter is of another base or tokenizer, or is damaged.
        UnsupportedError: an adapter of another kind.
        RunError: a checkpoint is damaged.
    """
    own = read_plan(run, catalogue)
    is_run = (adapter / "plan.toml").is_file()
    tuned = read_plan(adapter, catalogue) if is_run else own
    saved = Saved(checkpoint_of(adapter)) if is_run else None
    if saved is not None:
        _check_base(run, base, adapter, saved)
    plan = _plan(own, tuned, base, "" if is_run else str(adapter), with_data=with_data)
    if with_data:
        prepared = reopen(plan, RunFolder(run).read_data(), run)
    else:
        tokenizer = own_tokenizer(Saved(checkpoint_of(run), verify=False), run)
        none: Any = None  # a model alone reads no validation text
        prepared = Prepared(run, tokenizer, (), none, fingerprint={}, has_begun=True)
    until = Stage.STEP if with_data else Stage.MATERIALIZE
    build = make_build(plan, prepared, World(), choose_device(plan), until=until)
    if saved is not None:
        digest = saved.values["fingerprint"].get("tokenizer", "")
        now = {"tokenizer": prepared.tokenizer.fingerprint}
        check_same_data({"tokenizer": digest}, now, f"the tokenizer of {run}", adapter)
        for name, parameter in trained(build):
            saved.fill_(f"model/{name}", parameter)
    return build


def _plan(own: Plan, tuned: Plan, base: Path, folder: str, *, with_data: bool) -> Plan:
    """Return the plan of a base with an adapter; its text is that of `own`.

    Args:
        own: the plan of the run whose base it is.
        tuned: the plan of the run that trained the adapter; `own` where it is a folder.
        base: the folder of the weights.
        folder: the folder of the adapter, "" where a run trained it.
        with_data: whether rows of text are read.
    """
    techniques = {
        name: one
        for name, one in tuned.techniques.items()
        if (isinstance(one, AdapterTechnique) and not folder) or "loss_scale" in one.claims
    }
    techniques |= {
        name: one
        for name, one in own.techniques.items()
        if shapes_model(one, with_data=with_data)
        and not isinstance(one, AdapterTechnique)
        and (own.model.pretrained or one.stage == Stage.DATA)
    }
    model = {"pretrained": str(base), "precision": own.model.precision}
    if trains_adapters(own):
        model = {**dict(own.model), "pretrained": str(base)}
    return own.replaced(
        device="auto",
        techniques=techniques,
        mesh=MeshConfig(),
        model={**model, "adapter": folder},
        data={**dict(own.data), "curriculum": None},
    )


def _check_base(run: Path, base: Path, adapter: Path, saved: Saved) -> None:
    """Refuse an adapter that was trained beside other weights.

    Raises:
        ConfigError: with both digests.
    """
    was = str((saved.values.get("frozen") or {}).get("model.pretrained", ""))
    now = weights_digest(base)
    if was != now:
        raise ConfigError(
            f"the adapter of {adapter} was trained beside weights of sha256 {was[:12]}, and the "
            f"base of {run} in {base} has {now[:12]}",
            rerun_without("--adapter", verb=f"sample {shell(run)}"),
        )

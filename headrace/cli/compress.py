"""This module holds the verb `compress`: smaller copies of a model, each measured on its file."""

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import tomli_w
import typer

from headrace.cli.arguments import Checkpoint, Json, Overrides, TextTokens, share_of
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import (
    exit_codes,
    make_progress,
    note,
    show_json,
    show_table,
    started_as,
)
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError, nearest
from headrace.core.files import shell
from headrace.core.limits import WIDEST
from headrace.core.loading import loading

if TYPE_CHECKING:
    from headrace.assemble.sockets import Build
    from headrace.compress.spec import QuantizationSpec
    from headrace.core.progress import Progress
    from headrace.export.compression import Compression

FOLDER, PAGE, RECORD = "compressed", "compression.html", "report.json"
"""The folder that is made, and its files beside a folder of each point."""
USUAL_CUT = "20%"
"""Share of the weights that a recipe prunes, unless the command says another."""
OF_POINTS = ("--to", "--group", "--budget-mb", "--max-loss", "--checkpoint")
"""Options that a recipe decides."""
LONGEST = 1024
"""Most tokens of a row on which a folder of weights is evaluated, unless the command says more."""


def compress(
    model: Annotated[Path, typer.Argument(help="A run, or a folder of safetensors and config.")],
    overrides: Overrides = None,
    *,
    to: Annotated[
        str | None,
        typer.Option(
            help="By commas: int8, int8-dynamic, 8da4w, int4, int4-gptq, nf4, and pruned: 2:4, "
            "or a share as 50%; all of fewer bits that fit without it."
        ),
    ] = None,
    group: Annotated[
        int | None, typer.Option(min=1, max=WIDEST, help="Numbers under one scale of 4 bits.")
    ] = None,
    budget_mb: Annotated[
        float | None,
        typer.Option(min=1e-6, max=1e9, help="Most megabytes: choose the least loss within."),
    ] = None,
    max_loss: Annotated[
        str | None,
        typer.Option(help="Most rise of bits per byte, as 1%: choose the smallest within."),
    ] = None,
    recipe: Annotated[
        str | None,
        typer.Option(
            help="A whole path from a run to a file: edge (distil, prune, train in 4 bits, "
            "ExecuTorch) or inference-speed (distil, RMSNorm for layer norm, 8 bits, ONNX)."
        ),
    ] = None,
    by: Annotated[
        str | None, typer.Option(help="Share of the weights that a recipe prunes; 20% without.")
    ] = None,
    until: Annotated[
        str | None, typer.Option(help="The last hop of a recipe, as quantize; all without it.")
    ] = None,
    tokens: TextTokens = None,
    output: Annotated[
        Path | None, typer.Option(help="A new folder; RUN/compressed without it.")
    ] = None,
    checkpoint: Checkpoint = None,
    json: Json = False,
) -> None:
    """Quantize or prune a model's weights, and say what each way costs in loss and saves in size.

    A run is evaluated on its own validation text. With `data.sources=PATH` it is another text,
    which a folder of weights needs.
    """
    with exit_codes(json):
        if recipe is not None:
            _refuse(recipe, to, group, budget_mb, max_loss, checkpoint)
            _follow(model, recipe, overrides or [], by, until, tokens, output, as_json=json)
            return
        _refuse_alone(by, until)
        specs, asked = _specs(to, group), to is not None
        rise = None if max_loss is None else share_of("--max-loss", max_loss, "the loss", 0, 1000)
        if budget_mb is not None and rise is not None:
            raise ConfigError(
                "--budget-mb and --max-loss are two goals, and a point is chosen by one",
                rerun_without("--max-loss", verb="compress"),
            )
        progress = make_progress(json)
        try:
            with loading():
                from headrace.compress.quantized_model import formats_of
                from headrace.export.compression import (
                    SizeGoal,
                    check_reached,
                    compress_model,
                    plain_build,
                )
                from headrace.export.folder import new_folder, write_json
                from headrace.report.compression import compression_page
                from headrace.report.page import write_page
            given = overrides, checkpoint
            opened, folder, source, trained = open_with_text(model, *given, progress, FOLDER)
            build = plain_build(opened)
            specs = _as_trained(specs, group, trained, progress)
            if not asked:
                specs = _fitting(specs, lambda spec: formats_of(build.model, spec), progress)
            budget = None if budget_mb is None else round(budget_mb * 1e6)
            out = output or folder
            with new_folder(out) as aside:
                compression = compress_model(
                    build,
                    specs,
                    aside,
                    SizeGoal(budget, rise),
                    model=model.name,
                    source=source,
                    tokens=tokens or build.plan.eval.tokens,
                    progress=progress.task,
                )
                write_json(aside / RECORD, compression.to_dict())
                write_page(aside / PAGE, compression_page(compression))
        finally:
            progress.close()
        check_reached(compression)
        _show(compression, out, progress.notes, as_json=json)


def _show(compression: "Compression", out: Path, notes: list[str], *, as_json: bool) -> None:
    """Print every point, and which is chosen."""
    if as_json:
        show_json({"folder": str(out), **compression.to_dict(), "told": notes})
        return
    from headrace.report.compression import POINT_HEAD, point_rows, verdict_of

    show_table([*POINT_HEAD], point_rows(compression))
    note(f"\n{verdict_of(compression)}")
    note(f"report: {out / PAGE}")
    if (chosen := compression.chosen) is not None:
        note(f"next:   {started_as()} sample {shell(out / chosen.folder)}")


def _refuse(recipe: str, *given: object) -> None:
    """Refuse options that a recipe decides.

    Raises:
        ConfigError: names the first of them.
    """
    for option, value in zip(OF_POINTS, given, strict=True):
        if value is not None:
            raise ConfigError(
                f"{option} is of single points, and --recipe {recipe} decides it",
                rerun_without(option, verb="compress"),
            )


def _refuse_alone(by: str | None, until: str | None) -> None:
    """Refuse options of a recipe where none is named.

    Raises:
        ConfigError: names the first of them.
    """
    if by is not None or until is not None:
        option = "--by" if by is not None else "--until"
        raise ConfigError(
            f"{option} is of a recipe, and --recipe names none",
            rerun_without(option, verb="compress"),
        )


def _follow(
    model: Path,
    recipe: str,
    words: list[str],
    by: str | None,
    until: str | None,
    tokens: int | None,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Run a recipe, and print what each hop cost; see `compress`."""
    from headrace.cli.chain import HOPS_HEAD, Chain, hop_rows, recipe_of
    from headrace.inference.load import resolve_run

    share = share_of("--by", by or USUAL_CUT, "the weights", 1, 90)
    chosen, run = recipe_of(recipe, until), resolve_run(model)
    progress = make_progress(as_json)
    try:
        with loading():
            chain = Chain(
                run, chosen, output or run / recipe, words, share, until, tokens, progress
            )
        chain.follow()
    finally:
        progress.close()
    if as_json:
        hops = [asdict(hop) for hop in chain.hops]
        show_json(
            {"recipe": recipe, "folder": str(chain.out), "hops": hops, "told": progress.notes}
        )
        return
    show_table([*HOPS_HEAD], [*hop_rows(chain.hops)])
    note(f"every hop: {chain.out}")


def _specs(to: str | None, group: int | None) -> list["QuantizationSpec"]:
    """Return the specs that are named, or all presets.

    Raises:
        ConfigError: there is no such preset, or a share that cannot be pruned.
    """
    from headrace.compress.spec import PRESETS

    names = [*PRESETS] if to is None else [name.strip() for name in to.split(",")]
    specs = {spec.name: spec for spec in map(_spec, names)}.values()
    return [spec if group is None else spec.with_group(group) for spec in specs]


def _spec(name: str) -> "QuantizationSpec":
    """Return a preset, or what prunes by Wanda: 2:4, or a share of the weights in percent.

    Raises:
        ConfigError: it is none of these.
    """
    from headrace.compress.spec import PRESETS, SparsitySpec, sparse_spec

    if name == "2:4":
        return sparse_spec(SparsitySpec(metric="wanda"))
    if name.endswith("%"):
        share = share_of("--to", name, "the weights of blocks", 1, 99)
        return sparse_spec(SparsitySpec(pattern="unstructured", share=share, metric="wanda"))
    if name not in PRESETS:
        known = [*PRESETS, "2:4"]
        raise ConfigError(
            f"--to {name} is no preset; they are {', '.join(known)}, and a share as 50%",
            f"--to {nearest(name, known)}",
        )
    return PRESETS[name]


def _fitting(specs: list["QuantizationSpec"], check: Any, progress: "Progress") -> list[Any]:
    """Return the presets whose groups divide the model's widths, and tell of the others.

    Raises:
        ConfigError: none does.
    """
    fits, last = [], None
    for spec in specs:
        try:
            check(spec)
            fits.append(spec)
        except ConfigError as error:
            progress.note(f"{spec.name} is left out: {error.message}; {error.remedy}")
            last = error
    if not fits and last is not None:
        raise last
    return fits


def _as_trained(
    specs: list["QuantizationSpec"],
    group: int | None,
    trained: "QuantizationSpec | None",
    progress: "Progress",
) -> list["QuantizationSpec"]:
    """Return the specs, the one that the run was trained for with the groups of its training.

    Where the command names other groups, they hold, and the user is told.
    """
    if trained is None or trained in specs or trained.name not in {spec.name for spec in specs}:
        return specs
    in_groups = f"the run was trained for {trained.name} in groups of {trained.matrices.group}"
    if group is not None:
        progress.note(f"{in_groups}, and --group {group} stores it in others")
        return specs
    progress.note(f"{in_groups}, and is stored so")
    return [trained if spec.name == trained.name else spec for spec in specs]


def open_with_text(
    model: Path,
    overrides: list[str] | None,
    checkpoint: str | None,
    progress: "Progress",
    made: str,
) -> tuple["Build", Path, str, "QuantizationSpec | None"]:
    """Return a model with its validation text, the folder that is made, and its weights' digest.

    The last is the spec that it was trained for, where it was trained for one.

    Args:
        model: a run, or a folder of weights.
        overrides: of the command line.
        checkpoint: of the run; the best without it.
        progress: is told where weights are written.
        made: the name of the folder that is made of a run; one of weights' ends with it.

    Raises:
        ConfigError, UnsupportedError: it is no model, or there is no text for it.
    """
    from headrace.export.point import trained_spec
    from headrace.export.start import beginning
    from headrace.inference.load import checkpoint_of, open_model, resolve_run
    from headrace.model.adapter import weights_digest
    from headrace.model.companions import CONFIG
    from headrace.train.checkpoint import Saved

    words = overrides or []
    if not (model / CONFIG).is_file() and not words:
        run = resolve_run(model)
        path = checkpoint_of(run, checkpoint)
        build = open_model(run, catalogue(), checkpoint=checkpoint, with_data=True)
        seal = str(Saved(path, verify=False).values["seal"])
        return build, run / made, seal, trained_spec(build.plan)
    weights, own = beginning(model, catalogue(), progress.note, checkpoint=checkpoint)
    out = Path(f"{model.name}-{made}") if own is None else resolve_run(model) / made
    trained = None if own is None else trained_spec(own)
    return _with_text(model, weights, words), out, weights_digest(weights), trained


def _with_text(model: Path, weights: Path, words: list[str]) -> "Build":
    """Return a folder's model with the validation text of the command line.

    Raises:
        ConfigError: no text is named, or it is tokenized in another way than the model's.
    """
    from headrace.assemble.build import make_build
    from headrace.assemble.context import choose_device
    from headrace.data.ingest import prepare
    from headrace.data.tokenizer import Tokenizer
    from headrace.model.adapter import longest_row
    from headrace.parallel.world import World
    from headrace.plan.plan import Plan

    given = {word.partition("=")[0].strip() for word in words}
    if "data.sources" not in given:
        raise ConfigError(
            f"{model} is a folder of weights, which brings no text to evaluate on",
            "data.sources=PATH",
        )
    length = min(LONGEST, longest_row(weights) or LONGEST)
    tables = {
        "name": model.name,
        "model": {"pretrained": str(weights)},
        "data": {"tokenizer": str(weights), "sequence_length": length},
        "goal": {"steps": 1},
    }
    plan = Plan.read(tomli_w.dumps(tables), catalogue(), overrides=words)
    prepared = prepare(plan)
    own = Tokenizer.load(weights / "tokenizer.json")
    if prepared.tokenizer.fingerprint != own.fingerprint:
        raise ConfigError(
            f"data.tokenizer = {plan.data.tokenizer!r} is another tokenizer than that of {model} "
            f"(sha256 {prepared.tokenizer.fingerprint[:12]}, not {own.fingerprint[:12]}): its ids "
            "mean other text",
            f"data.tokenizer={shell(weights)}",
        )
    return make_build(plan, prepared, World(), choose_device(plan))

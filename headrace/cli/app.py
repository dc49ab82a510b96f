"""The command line: one verb is one function; those of the closed loop are in closed_loop.py.

It discovers the techniques, reads the plan with them, calls train, then writes findings and report.
"""

import shlex
import sys
from collections.abc import Callable
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from headrace.assemble.context import choose_device, make_context
from headrace.catalogue.explain import (
    check_explained,
    explain_plan,
    explain_technique,
    nothing_to_explain,
)
from headrace.catalogue.graphs import explain_graphs
from headrace.catalogue.matrix import explain_matrix, read_matrix
from headrace.catalogue.table import catalogue_rows
from headrace.cli import closed_loop
from headrace.cli.arguments import (
    Checkpoint,
    Json,
    Overrides,
    PlanName,
    RunName,
    Version,
    With,
    Without,
    catalogue,
    named_plan,
)
from headrace.cli.terminal import (
    console,
    exit_codes,
    make_progress,
    show_json,
    show_table,
    started_as,
    tell_error,
)
from headrace.cli.verbs import Verbs
from headrace.core.errors import ConfigError, HeadraceError
from headrace.core.model_config import WIDEST
from headrace.core.units import format_count, format_seconds, part_of_text
from headrace.data.ingest import prepare
from headrace.doctor.advice import advise
from headrace.doctor.words.answer import NOTHING_GAINS, closing_verdict, findings_json
from headrace.export.run import export_run
from headrace.inference.load import (
    computed,
    open_model,
    plan_to_resume,
    read_plan,
    resolve_run,
    run_of,
)
from headrace.inference.sample import generate
from headrace.model.companions import LOST, Companions, read_companions
from headrace.model.zoo import families
from headrace.plan.plan import MOST, Plan
from headrace.recipes import recipes
from headrace.train import train as trainer
from headrace.train.evaluate import doubts, evaluate, finite
from headrace.train.interrupts import Closing, Interrupts, Preparing
from headrace.train.run_folder import RunFolder

app = typer.Typer(
    cls=Verbs, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False
)
MOST_NEW = 1_000_000
"""Most tokens that a sample adds; each of them takes a forward pass."""
data_app = typer.Typer(no_args_is_help=True, help="Prepare data.")
app.add_typer(data_app, name="data")


@app.callback()
def _before_verbs(*, version: Version = False) -> None:
    """Train language models, name the bottleneck of a run, and remove it with a receipt."""


@app.command()
def train(
    plan: PlanName, overrides: Overrides = None, *,
    with_: With = None, without: Without = None,
    resume: Annotated[bool, typer.Option(help="Continue the newest run of this name.")] = False,
    checkpoint: Checkpoint = None, json: Json = False,
) -> None:  # fmt: skip
    """Train a plan to its goal, and report what was narrowest."""
    with exit_codes(json, together=True), ExitStack() as stack:
        read = named_plan(plan, overrides, with_, without)
        if checkpoint and not resume:
            raise ConfigError(
                "--checkpoint says where to resume from", f"--resume --checkpoint {checkpoint}"
            )
        Interrupts.tell = partial(tell_error, as_json=json)
        progress = make_progress(json)
        closing = stack.enter_context(Closing())
        try:
            if resume:
                read = plan_to_resume(
                    read, run_of(plan), catalogue(), overrides=overrides or (), with_=with_ or (),
                    without=without or (), tell=progress.note, checkpoint=checkpoint,
                )  # fmt: skip
            folder = trainer.run(
                read, progress=progress, resume=resume, folder=run_of(plan), checkpoint=checkpoint,
                catalogue=catalogue(), command=True,
            )  # fmt: skip
        except HeadraceError as error:
            closing.begin()
            if error.run is not None:
                run = error.run
                _optional("conclusion", {}, Closing(), lambda: conclude(run, closing))
            raise
        finally:
            closing.begin()
            progress.close()
        if folder is None:  # the first rank tells
            return
        report = conclude(folder, closing)
        if json:
            show_json({**report, "told": progress.notes})
        else:
            _tell(folder, report, on_its_own=[*read.source_list] == ["stdlib"])


def conclude(folder: Path, closing: Closing | None = None) -> dict[str, Any]:
    """Add findings, a sample and the page to the report of a run that has ended; return the report.

    The run is complete without them: what cannot be made is told, also under "not_made".

    Args:
        folder: the run's.
        closing: hears the signals that leave out what is not made yet.
    """
    closing = closing or Closing()
    run = RunFolder(folder)
    report = run.read_report()
    missing: dict[str, str] = {}
    report |= {"narrowest": None, "sample": None, "not_made": missing}

    def findings() -> None:
        advice = advise(folder, catalogue())
        report["narrowest"] = closing_verdict(advice)
        run.write("findings", findings_json(advice))

    def page() -> None:
        from headrace.report import write_report  # its charts load matplotlib, which no step needs

        write_report(folder)

    _optional("findings", missing, closing, findings)
    if (folder / "checkpoints" / "latest").exists() and report["status"] != "failed":
        _optional("sample", missing, closing, lambda: report.update(sample=_sample_of(folder)))
    _optional(
        "report with findings and sample", missing, Closing(), partial(run.write, "report", report)
    )
    _optional("page", missing, closing, page)
    if "page" in missing:
        with suppress(OSError):  # it has been told
            run.write("report", report)
    if left_out := [what for what, why in missing.items() if why == closing.name]:
        console.print(f"{closing.name} came after the run's end, and leaves out its "
                      f"{', '.join(left_out)}", markup=False, soft_wrap=True)  # fmt: skip
    return report


def _optional(
    what: str, missing: dict[str, str], closing: Closing, make: Callable[[], object]
) -> None:
    """Make it, or keep in `missing` why it cannot be made, tell that in one line, and go on."""
    try:
        if not closing.make(make):
            missing[what] = str(closing.name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what Rust raises is no Exception
        said = str(error).strip().splitlines() or [type(error).__name__]
        missing[what] = said[0]
        console.print(f"no {what}: {said[0]}; the run is complete without", markup=False,
                      soft_wrap=True)  # fmt: skip


def _sample_of(folder: Path, *, new_tokens: int = 80) -> dict[str, str]:
    build = open_model(folder, catalogue())
    if build.config.position == "learned":  # it has no position beyond its context
        new_tokens = min(new_tokens, build.config.context - 1)
    text = _generate(build, "", new_tokens=new_tokens, temperature=0.8, top_k=50, seed=0)
    return {"prompt": "", "text": text}


def _generate(build: Any, prompt: str, *, new_tokens: int, **how: Any) -> str:
    tokenizer = build.prepared.tokenizer
    ids = [tokenizer.document_token, *tokenizer.encode_batch([prompt])[0].tolist()]
    ids_BT = torch.tensor([ids], device=build.device)
    with build.autocast():
        out = generate(
            build.model, ids_BT, new_tokens=new_tokens, stop=tokenizer.document_token,
            entries=tokenizer.vocab, **how,
        )  # fmt: skip
    new = [i for i in out[0, len(ids) :].tolist() if i != tokenizer.document_token]
    return tokenizer.decode(new)


def _tell(folder: Path, report: dict[str, Any], *, on_its_own: bool) -> None:
    """What became of a run, and what to type next; `on_its_own` text it tells how to use yours."""
    goal, last = report["goal"], report["val"][-1]
    asked, ended = goal["asked"].get("bits_per_byte"), goal["ended_by"]
    if asked:
        reached = "goal reached" if goal["reached"] else f"budget spent ({ended})"
    else:
        reached = f"ended by {ended}"
    if report["outcome"]["diverged"]:
        reached = f"{report['outcome']['sentence']}; {reached}"
    target = f" (goal {asked})" if asked else ""
    part = f" {part_of_text(last['share'])}" if "share" in last else ""  # an older checkpoint's
    speed = report["steady_tokens_per_s"]
    rate = f"{format_count(speed)} tokens/s in steady steps" if speed else "speed not measured"
    prompt = " --prompt 'def main('" if on_its_own else ""
    found, page = (
        report["narrowest"],
        "report.json" if "page" in report["not_made"] else "report.html",
    )
    yours = f"\n        {started_as()} train demo data.sources=PATH_OF_YOUR_TEXT name=mine"
    console.print(
        f"\n{reached}: {last['bits_per_byte']:.3f} bits per byte"
        f"{part}{target} after "
        f"{format_count(report['tokens'])} tokens and {format_seconds(report['wall_s'])}, {rate}\n"
        + "".join(f"{one['sentence']}; try: {one['remedy']}\n" for one in report["data"]["doubts"])
        + _verdict(found)
        + (f"sample: {report['sample']['text']}\n" if report["sample"] else "")
        + f"report: {folder / page}\n"
        f"next:   {started_as()} sample {folder}{prompt}" + yours * on_its_own,
        markup=False, soft_wrap=True,
    )  # fmt: skip


def _verdict(found: dict[str, Any] | None) -> str:
    """The doctor's verdict with its remedy, in lines; none where no finding could be made."""
    if not found:
        return ""
    lines = f"{found['sentence']} ({found['evidence']})\n"
    if found["unknown"]:
        lines += f"{found['unknown']}\n"
    if found["healthy"]:
        lines += f"healthy: {NOTHING_GAINS}\n"
    return lines + (f"try first: {found['remedy']}: {found['gain']}\n" if found["remedy"] else "")


@app.command("eval")
def evaluate_run(
    run: RunName, *, checkpoint: Checkpoint = None,
    tokens: Annotated[int | None, typer.Option(
        min=1, max=MOST,
        help="At most this many, spread evenly over the text; all without it.")] = None,
    json: Json = False,
) -> None:  # fmt: skip
    """Validation loss of a run's checkpoint over all its text, in nats and bits per byte."""
    with exit_codes(json):
        folder = resolve_run(run)
        build = open_model(folder, catalogue(), checkpoint=checkpoint, with_data=True)
        found = computed(
            lambda: finite(evaluate(build, tokens)), build, folder, catalogue(),
            checkpoint=checkpoint,
        )  # fmt: skip
        values = {"run": str(folder), **vars(found), **build.prepared.loss_fields}
        # Who asks for few of many targets knows it.
        counted = found.tokens if found.share == 1 else build.prepared.validation.tokens - 1
        told = doubts(build, None, counted, bits_per_byte=found.bits_per_byte)
        if json:
            doubtful = {"doubts": [doubt.to_dict() for doubt in told]} if told else {}
            show_json(values | doubtful)
        else:
            show_table(list(values), [[f"{v:.4f}" if isinstance(v, float) else str(v)
                                       for v in values.values()]])  # fmt: skip
            for doubt in told:
                print(doubt.line)


@app.command()
def sample(
    run: RunName, *,
    prompt: Annotated[str, typer.Option(help="Text to continue.")] = "",
    tokens: Annotated[int, typer.Option(min=1, max=MOST_NEW, help="Most tokens to add.")] = 200,
    temperature: Annotated[float, typer.Option(min=0, max=1e6, help="0 is greedy.")] = 0.8,
    top_k: Annotated[int, typer.Option(min=0, max=WIDEST, help="0 is all.")] = 50,
    top_p: Annotated[float, typer.Option(max=1, help="Above 0; 1 is all.")] = 1.0,
    seed: int = 0, checkpoint: Checkpoint = None, json: Json = False,
) -> None:  # fmt: skip
    """Continue a prompt with a trained run."""
    with exit_codes(json):
        if prompt != (text := prompt.encode(errors="replace").decode()):
            raise ConfigError(
                f"the prompt is not UTF-8: {prompt!a}", f"--prompt {shlex.quote(text)}"
            )
        if not -(2**63) <= seed < 2**63:
            raise ConfigError("--seed takes whole numbers of 64 bits", f"--seed {2**63 - 1}")
        folder = resolve_run(run)
        build = open_model(folder, catalogue(), checkpoint=checkpoint)
        how = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "seed": seed}
        text = computed(
            lambda: _generate(build, prompt, new_tokens=tokens, **how), build, folder, catalogue(),
            checkpoint=checkpoint,
        )  # fmt: skip
        lost = build.prepared.loss_fields
        if json:
            show_json({"prompt": prompt, "text": text, **lost})
        else:
            print(prompt + text)
            for loses in lost.values():
                print(f"the tokenizer loses text: {loses}", file=sys.stderr)


@app.command("list")
def list_techniques(
    *, families_: Annotated[bool, typer.Option("--families", help="Model families.")] = False,
    recipes_: Annotated[bool, typer.Option("--recipes", help="Recipes.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """Every technique in a line; or model families, or recipes."""
    with exit_codes(json):
        if families_ and recipes_:
            raise ConfigError(
                "list prints one table, and --families and --recipes ask for two",
                "headrace list --families; headrace list --recipes",
            )
        if families_:
            rows = [
                {"family": name, "defaults": " ".join(f"{k}={v}" for k, v in values.items())}
                for name, values in families().items()
            ]
        elif recipes_:
            rows = [{"recipe": name, "file": str(path)} for name, path in recipes().items()]
        else:
            rows = catalogue_rows(catalogue())
        if json:
            show_json(rows)
        else:
            show_table(list(rows[0]) if rows else [], [[str(v) for v in r.values()] for r in rows])


@app.command()
def explain(
    what: Annotated[str, typer.Argument(help="A plan, a recipe or a technique.")] = "",
    overrides: Overrides = None, *, with_: With = None, without: Without = None,
    matrix: Annotated[bool, typer.Option("--matrix", help="Which pairs stand together.")] = False,
    graph: Annotated[bool, typer.Option("--graph", help="What a plan compiles, and why.")] = False,
    json: Json = False,
) -> None:  # fmt: skip
    """A technique's card; or a plan's sockets in order, who fills each, and what it will cost."""
    with exit_codes(json):
        known = catalogue()
        changes = bool(overrides or with_ or without)
        check_explained(what, known, matrix=matrix, graph=graph, changes=changes)
        if matrix:
            value = read_matrix()
            text = explain_matrix(value)
        elif not what:
            raise ConfigError(
                "explain takes a technique, a recipe or a plan file (with --graph a recipe or a "
                "plan file); only --matrix goes without",
                "headrace explain demo; headrace list has the techniques by room, "
                "headrace list --recipes the recipes",
            )
        elif what in known.techniques:
            value, text = explain_technique(known.techniques[what])
        elif what not in recipes() and not (
            Path(what).is_file() or Path(what, "plan.toml").is_file()
        ):
            raise nothing_to_explain(what, known, recipes())
        else:
            plan = named_plan(what, overrides, with_, without, verb="explain")
            value, text = (
                _graphs(plan, json) if graph
                else explain_plan(plan, make_context(plan, choose_device(plan)))
            )  # fmt: skip
        if json:
            show_json(value)
        else:
            print(text)


def _graphs(plan: Plan, json: bool) -> tuple[dict[str, Any], str]:
    progress = make_progress(json)
    try:
        return explain_graphs(plan, progress)
    finally:
        progress.close()


@app.command()
def report(runs: Annotated[list[Path], typer.Argument(help="One run, or several to compare.")], *,
           output: Annotated[Path | None, typer.Option(
               help="Where the page goes: into the run, or comparison.html, without it.")] = None,
           json: Json = False) -> None:  # fmt: skip
    """Write a run's page again, or lay runs side by side on one page."""
    from headrace.report import compare_reports, write_report

    with exit_codes(json):
        folders = [resolve_run(r) for r in runs]
        alone = len(folders) == 1
        page = (
            write_report(folders[0], output) if alone
            else compare_reports(folders, output or Path("comparison.html"))
        )  # fmt: skip
        if json:
            show_json({"page": str(page)})
        else:
            print(page)


@app.command()
def export(
    run: RunName, *,
    to: Annotated[str, typer.Option(help="hf: Hugging Face safetensors, config and tokenizer.")],
    output: Annotated[Path | None, typer.Option(help="A new folder; RUN/hf without it.")] = None,
    checkpoint: Checkpoint = None, json: Json = False,
) -> None:  # fmt: skip
    """Write a run's model in another tool's format."""
    with exit_codes(json):
        folder = resolve_run(run)
        build = open_model(folder, catalogue(), checkpoint=checkpoint)
        plan = read_plan(folder, catalogue())
        companions = read_companions(
            folder, plan.model.pretrained, lambda line: print(line, file=sys.stderr)
        )
        written = export_run(
            build, to, output or folder / to, run=folder,
            sequence_length=plan.data.sequence_length,
            companions=companions or Companions(),
        )  # fmt: skip
        told = build.prepared.loss_fields
        if json:
            lost = [*LOST] if companions is None else []
            show_json({"to": to, "folder": str(written), "not_kept": lost, **told})
        else:
            print(written)
            for loses in told.values():
                print(f"the tokenizer loses text: {loses}", file=sys.stderr)


@data_app.command()
def ingest(plan: PlanName = "demo", overrides: Overrides = None, *, json: Json = False) -> None:
    """Tokenizer and shards of a plan's data, without training."""
    with exit_codes(json), Preparing():
        progress = make_progress(json)
        try:
            read = named_plan(plan, overrides, verb="data ingest")
            prepared = prepare(read, progress=progress.task)
            told = prepared.sides(read.data.validation).doubts(read.data.sequence_length)
            for one in prepared.left_out:
                progress.note(one.line())
            if prepared.tokenizer.note:
                progress.note(prepared.tokenizer.note)
            for doubt in told:
                progress.note(doubt.line)
        finally:
            progress.close()
        value = prepared.to_dict(read.data.validation)
        if json:
            left_out = [one.to_dict() for one in prepared.left_out]
            show_json(value | {"left_out": left_out, "doubts": [one.to_dict() for one in told]})
        else:
            rows = {key: val for key, val in value.items() if val is not None}
            if both := rows.get("overlap"):
                rows["overlap"] = f"{both['documents']} of {both['of_documents']} documents"
            show_table(["what", "value"], [[key, str(val)] for key, val in rows.items()])


for verb in closed_loop.VERBS:
    app.command()(verb)

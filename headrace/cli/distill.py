"""This module holds the verb `distill`: from a teacher and a student to a trained run."""

from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.arguments import Epochs, Json, Overrides, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.finetune import (
    RECIPE,
    MethodPredicted,
    kind_of,
    lengths_of,
    rate_of,
    show_tuned,
    too_large,
    with_its_schedule,
    with_steps,
)
from headrace.cli.terminal import exit_codes, show_json, show_table
from headrace.cli.train import begin_training, concluded, training_of
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.limits import WIDEST
from headrace.core.units import format_count

if TYPE_CHECKING:
    from headrace.core.progress import Progress
    from headrace.plan.plan import Plan

TECHNIQUE = "distillation"


@dataclass(frozen=True)
class Costs:
    """Hold what a teacher and a student are, and what the teacher costs.

    Args:
        teacher: the folder of its weights.
        student: the folder of its weights, or the plan that draws them.
        teacher_parameters, student_parameters: how many each has.
        teacher_forward_flops, student_forward_flops: FLOPs a token of a forward pass.
        share_of_step: the teacher's FLOPs in those of a step; 0 where it reads the text beforehand.
        bytes_per_token: of what is kept of its words; 0 where it reads each batch.
    """

    teacher: str
    student: str
    teacher_parameters: int
    student_parameters: int
    teacher_forward_flops: float
    student_forward_flops: float
    share_of_step: float
    bytes_per_token: int

    def rows(self) -> list[list[str]]:
        """Return a row for each model."""
        reads = f"reads each batch: {self.share_of_step:.0%} of a step's FLOPs"
        if self.bytes_per_token:
            reads = f"reads the text once: {self.bytes_per_token} bytes a token are kept"
        sizes = [format_count(self.teacher_parameters), format_count(self.student_parameters)]
        flops = [format_count(self.teacher_forward_flops), format_count(self.student_forward_flops)]
        return [
            ["teacher", self.teacher, sizes[0], flops[0], reads],
            ["student", self.student, sizes[1], flops[1], ""],
        ]


def distill(
    teacher: Annotated[Path, typer.Argument(help="A run, or a folder of safetensors and config.")],
    student: Annotated[
        str, typer.Argument(help="A recipe or a TOML file, or a run or a folder to train on.")
    ],
    data: Annotated[
        str | None, typer.Argument(help="Text or conversations; a file or folder.")
    ] = None,
    overrides: Overrides = None,
    *,
    epochs: Epochs = None,
    with_: With = None,
    without: Without = None,
    dry_run: Annotated[bool, typer.Option(help="Show the plan and train nothing.")] = False,
    json: Json = False,
) -> None:
    """Train a student on a teacher's whole distribution beside the tokens of a text.

    A recipe or a plan is trained from scratch, with the teacher's tokenizer; a run or a folder is
    trained on. The teacher reads each batch, or with techniques.distillation.top_k=K the whole
    text once, and its K likeliest tokens of each place are kept for this run and later ones.
    """
    with exit_codes(json, together=True), ExitStack() as stack:
        progress, closing = begin_training(stack, as_json=json)
        with concluded(progress, closing):
            words = [*(overrides or ())]
            if data is not None and "=" in data and not Path(data).exists():
                words, data = [data, *words], None
            given = frozenset(word.partition("=")[0].strip() for word in words)
            plan = _plan(teacher, student, data, words, [*(with_ or ())], without or [], progress)
            costs = _costs(plan, student)
            if epochs is not None or plan.model.pretrained:
                plan = with_its_schedule(with_steps(plan, given, epochs, progress), given)
            if dry_run:
                _show_plan(plan, costs, as_json=json)
                return
            if not json:
                _show_costs(costs)
            result = training_of(plan, progress)()
        show_tuned(result, plan, closing, progress, as_json=json, costs=asdict(costs))


def _plan(
    teacher: Path,
    student: str,
    data: str | None,
    words: list[str],
    add: list[str],
    drop: list[str],
    progress: "Progress",
) -> "Plan":
    """Return the plan of a distillation, whose steps the data may decide later.

    Raises:
        ConfigError, UnsupportedError: the teacher, the student or the data is refused.
    """
    from headrace.cli.plans import named_plan
    from headrace.export.start import beginning
    from headrace.model.adapter import longest_row, read_config
    from headrace.recipes import recipes

    if TECHNIQUE in drop:
        raise ConfigError(
            f"distill without {TECHNIQUE} is no distillation",
            f"headrace train {student}, without a teacher",
        )
    given = frozenset(word.partition("=")[0].strip() for word in words)
    folder, _ = beginning(teacher, catalogue(), progress.note)
    longest, vocab = longest_row(folder), read_config(folder, "TEACHER").vocab
    base = [f"techniques.{TECHNIQUE}.teacher={folder}", f"name={Path(student).stem}-distilled"]
    tokenizer, recipe = folder, student
    if student in recipes() or student.endswith(".toml"):
        base += [f"data.tokenizer={folder}", f"model.vocab={vocab}", "eval.before=true"]
    else:
        if data is None and "data.sources" not in given:
            raise ConfigError(
                f"distill takes a text for {student}, which is trained on: {student} is no plan, "
                "and brings none",
                f"headrace distill {shell(teacher)} {shell(student)} PATH",
            )
        begun = beginning(Path(student), catalogue(), progress.note)
        tokenizer, recipe = begun.weights, RECIPE
        base += [f"model.pretrained={tokenizer}", f"data.tokenizer={tokenizer}"]
        written = named_plan(recipe, verb="distill")
        base += lengths_of(begun, given, written, longest or WIDEST)
        method = "lora" if {"lora", "qlora", "dora"} & {*add} else "full"
        base.append(f"optimizer.lr={rate_of(begun.plan, method):.3g}")
    if data is not None:
        written = named_plan(recipe, verb="distill")
        base += [f"data.sources={data}", *kind_of(data, tokenizer, given, written, progress)]
    plan = named_plan(recipe, [*base, *words], add, drop, verb="distill")
    _check_fits(plan)
    return plan


def _check_fits(plan: "Plan") -> None:
    """Refuse a plan that is predicted to need more memory than the device has.

    Raises:
        UnsupportedError: with both sizes.
    """
    from headrace.cli.plans import place
    from headrace.predict.prediction import predict

    method = MethodPredicted("full", plan, predict(plan, *place(plan)))
    if method.fits == "no":
        raise too_large(method)


def _costs(plan: "Plan", student: str) -> Costs:
    """Return what teacher and student are, and what the teacher costs, by the ledger."""
    from headrace.assemble.build import make_ledger
    from headrace.assemble.context import choose_device, make_context
    from headrace.costs.count import total_parameters
    from headrace.model.adapter import read_config, shape_of

    knobs: Any = plan.techniques[TECHNIQUE]
    in_loop = {TECHNIQUE: knobs.model_copy(update={"top_k": None})}
    reading = plan.replaced(techniques={**plan.techniques, **in_loop})
    flops = make_ledger(reading, make_context(reading, choose_device(reading))).flops
    config = read_config(Path(knobs.teacher), f"techniques.{TECHNIQUE}.teacher")
    kept = (knobs.top_k or 0) * (6 if config.vocab <= 1 << 16 else 8) + 4
    return Costs(
        teacher=knobs.teacher,
        student=plan.model.pretrained or student,
        teacher_parameters=total_parameters(config),
        student_parameters=total_parameters(shape_of(plan.model)),
        teacher_forward_flops=flops["teacher"],
        student_forward_flops=flops["forward"],
        share_of_step=0.0 if knobs.top_k else flops["teacher"] / sum(flops.values()),
        bytes_per_token=kept if knobs.top_k else 0,
    )


def _show_costs(costs: Costs) -> None:
    """Print what each model is, and what the teacher costs."""
    show_table(["", "model", "parameters", "FLOPs a token", ""], costs.rows())


def _show_plan(plan: "Plan", costs: Costs, *, as_json: bool) -> None:
    """Print the plan as TOML, or with its costs as JSON."""
    if as_json:
        show_json({"plan": plan.dump(), "costs": asdict(costs)})
        return
    _show_costs(costs)
    print(plan.to_toml())

"""This module holds the verb `finetune`: from a model and a file of examples to a trained run."""

import json as json_module
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import typer

from headrace.cli.arguments import Epochs, Json, Overrides, With, Without
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import (
    exit_codes,
    note,
    show_json,
    show_table,
    started_as,
)
from headrace.cli.train import begin_training, concluded, training_of, verdict_lines
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.files import shell
from headrace.core.limits import WIDEST
from headrace.core.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from headrace.core.progress import Progress
    from headrace.export.start import Beginning
    from headrace.plan.chat import RowKind
    from headrace.plan.plan import Plan
    from headrace.predict.prediction import Prediction
    from headrace.train.interrupts import Closing
    from headrace.train.result import Conclusion, Result

Method = Literal["full", "lora", "qlora", "dora"]
METHODS: tuple[Method, ...] = ("full", "lora", "qlora")
"""What is tried, from the one that learns most to the one that needs least memory."""
ASKED: tuple[Method, ...] = (*METHODS, "dora")
"""What `--with` chooses among."""
RECIPE = "finetune"
DEMO = "demo"
"""The model whose examples, where none are named, are Headrace's own documentation."""
FULL_RATE = 2e-5
"""Learning rate of all weights of a folder (Tulu 3, arXiv 2411.15124, table 8)."""
RUN_RATE = 0.2
"""Rate of all weights of a run, as a share of its own."""


def finetune(
    model: Annotated[Path, typer.Argument(help="A run, or a folder of safetensors and config.")],
    data: Annotated[
        str | None,
        typer.Argument(help="Conversations, prompts with answers, or text; a file or folder."),
    ] = None,
    overrides: Overrides = None,
    *,
    epochs: Epochs = None,
    recipe: Annotated[
        str, typer.Option(help="What the plan begins with: a recipe's name or a TOML file.")
    ] = RECIPE,
    with_: With = None,
    without: Without = None,
    dry_run: Annotated[bool, typer.Option(help="Show the plan and train nothing.")] = False,
    json: Json = False,
) -> None:
    """Train a model on your examples, and say what it gained.

    The method is the recipe's, or else the first of full, lora and qlora that fits this device;
    `--with full`, `lora` or another technique chooses.
    """
    with exit_codes(json, together=True), ExitStack() as stack:
        progress, closing = begin_training(stack, as_json=json)
        with concluded(progress, closing):
            changes = FinetuneWords(recipe, overrides or [], with_ or [], without or [])
            chosen = _choose(model, data, changes, progress)
            plan = with_steps(chosen.method.plan, chosen.given, epochs, progress)
            plan = with_its_schedule(plan, chosen.given)
            if dry_run:
                _show_plan(plan, chosen, as_json=json)
                return
            if not json:
                _show_methods(chosen)
            result = training_of(plan, progress)()
        methods = [method.to_dict() for method in chosen.methods]
        show_tuned(result, plan, closing, progress, as_json=json, methods=methods)


@dataclass(frozen=True)
class MethodPredicted:
    """Hold what one method to fine-tune needs.

    Args:
        name: the method.
        plan: what it would train.
        prediction: of the plan; None where it is refused or cannot be predicted here.
        reason: why there is none.
    """

    name: Method
    plan: "Plan"
    prediction: "Prediction | None"
    reason: str = ""

    @property
    def fits(self) -> str:
        """Return "yes", "tight", "no", or "unknown"."""
        return self.prediction.memory.fits if self.prediction else "unknown"

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        peak = self.prediction.memory.peak_bytes if self.prediction else None
        step = self.prediction.time.step_s if self.prediction else None
        values = {"method": self.name, "fits": self.fits, "peak_bytes": peak, "step_s": step}
        return values | ({"reason": self.reason} if self.reason else {})


@dataclass(frozen=True)
class Chosen:
    """Hold the method of a fine-tuning, whose plan has no number of steps yet.

    Args:
        method: the method that was chosen.
        methods: the methods that were looked at.
        given: keys that the command sets.
    """

    method: MethodPredicted
    methods: tuple[MethodPredicted, ...]
    given: frozenset[str]


class FinetuneWords(NamedTuple):
    """Hold what the command says of the plan."""

    recipe: str
    words: list[str]
    add: list[str]
    drop: list[str]


def _choose(model: Path, data: str | None, changes: FinetuneWords, progress: "Progress") -> Chosen:
    """Return the plan of the first method that fits, or of the method that is asked for.

    Raises:
        ConfigError, UnsupportedError: the model, the data or every method is refused.
    """
    from headrace.cli.plans import named_plan
    from headrace.export.start import beginning

    recipe, words, add, drop = changes
    written = named_plan(recipe, verb="finetune")
    if data is not None and "=" in data and not Path(data).exists():
        words, data = [data, *words], None
    for word in words:  # said by its key, as a remedy does
        key, _, value = word.partition("=")
        data = value if key.strip() == "data.sources" else data
    source = _documentation() if data is None and model.name == DEMO else data
    if source is None:
        raise ConfigError(
            f"finetune {model} takes a file of examples: conversations, prompts with answers, text",
            f"headrace finetune {shell(model)} FILE.jsonl",
        )
    folder, own = begun = beginning(model, catalogue(), progress.note)
    given = frozenset(word.partition("=")[0].strip() for word in words)
    base = [f"model.pretrained={folder}", f"data.tokenizer={folder}", f"data.sources={source}"]
    base += [f"name={model.name}-tuned", *lengths_of(begun, given, written)]
    base += kind_of(source, folder, given, written, progress)
    own_methods: list[Method] = [name for name in ASKED if name in written.techniques]
    asked: list[Method] = [name for name in ASKED if name in add]
    asked = asked or [name for name in own_methods if name not in drop]
    adapters = [name for name in add if name not in ASKED]
    if PAIRS in base and PREFERENCE not in adapters:
        adapters.append(PREFERENCE)

    def plan_of(name: Method) -> "Plan":
        rate = rate_of(own, name) * (PAIRS_RATE if PAIRS in base else 1)
        own_rate = recipe != RECIPE and "lr" in written.optimizer.model_fields_set
        own_rate = own_rate and (not own_methods or name in own_methods)
        rates = [] if own_rate else [f"optimizer.lr={rate:.3g}"]
        more = [] if name == "full" or name in own_methods else [name]
        less = [other for other in own_methods if other != name and other not in drop]
        own_words = [*base, *rates, *words]
        return named_plan(recipe, own_words, [*more, *adapters], [*drop, *less], verb="finetune")

    methods = [*_predicted(plan_of, asked or METHODS)]
    fitting = [method for method in methods if method.fits in ("yes", "tight")]
    unknown = [method for method in methods if method.fits == "unknown"]
    best = next(iter(fitting or unknown), methods[-1])
    if best.fits == "no":
        raise too_large(best)
    return Chosen(best, tuple(methods), given)


PREFERENCE = "preference"
"""The technique that learns from pairs."""
PAIRS = "data.chat.kind=preference"
"""The key of data that holds pairs."""
PAIRS_RATE = 1 / 20
"""Learning rate of pairs for that of conversations: trl's defaults are 1e-6 and 2e-5."""
EPOCHS = 3.0
"""Passes over the data where neither the command nor the plan says when the run ends."""
COUNTS = {"goal.steps", "goal.tokens"}
"""Keys that say how much is trained, as `--epochs` does."""
ENDS = {*COUNTS, "goal.minutes", "goal.bits_per_byte", "goal.dollars"}
"""Keys that say when a run ends."""


def rate_of(own: "Plan | None", method: Method) -> float:
    """Return the learning rate of a method; `own` is the plan of a run that made the weights."""
    if method != "full":
        return catalogue().techniques[method].usual_rate or FULL_RATE
    return FULL_RATE if own is None else RUN_RATE * own.optimizer.lr


def lengths_of(
    begun: "Beginning", given: frozenset[str], written: "Plan", longest: int = WIDEST
) -> Iterator[str]:
    """Yield the length of sequences and the size of a step, where the command says neither.

    A sequence is as long as the recipe's, or as the model's or `longest` where that is shorter; a
    step has as many sequences as the recipe's.
    """
    from headrace.model.adapter import longest_row

    if "data.sequence_length" in given:
        return
    if begun.plan is not None:
        length = begun.plan.data.sequence_length
    else:
        length = longest_row(begun.weights)
    own = written.data.sequence_length
    longest = min(own, longest)
    length = min(length or longest, longest)
    yield f"data.sequence_length={length}"
    if "batch.tokens" not in given:
        yield f"batch.tokens={written.batch.tokens // own * length}"


def kind_of(
    source: str, folder: Path, given: frozenset[str], written: "Plan", progress: "Progress"
) -> Iterator[str]:
    """Yield the keys of conversations, where the data holds them, and say what it holds."""
    from headrace.data.chat.conversation import WORDS
    from headrace.data.chat.encode import has_template

    kind = _first_kind(source)
    if kind == "text":
        progress.note(f"{source} begins with plain text: every token counts")
        return
    counted = "its answers are compared" if kind == "preference" else "the loss counts the answers"
    progress.note(f"{source} begins with {WORDS[kind]}: {counted}")
    if written.data.chat is None:
        yield "data.chat={}"
    if kind == "preference" and "data.chat.kind" not in given:
        yield PAIRS
    named = written.data.chat is not None and written.data.chat.template
    if "data.chat.template" not in given and not named and not has_template(folder):
        progress.note(f"{folder} has no chat template: ChatML is used, and kept with the run")
        yield "data.chat.template=chatml"


def _first_kind(source: str) -> "RowKind":
    """Return what the first row of the data holds.

    Raises:
        ConfigError: it holds nothing that can be trained on.
    """
    from headrace.data.chat.conversation import ChatReading
    from headrace.data.fields import TextReading
    from headrace.data.sources import read_documents
    from headrace.plan.chat import ChatConfig

    def first(config: ChatConfig) -> "RowKind":
        reading = TextReading("text", chat=ChatReading(config, "text"))
        document = next(iter(read_documents(source, reading=reading)), None)
        return json_module.loads(document.text)["kind"] if document else "text"

    try:
        return first(ChatConfig())
    except ConfigError as refused:
        try:
            return first(ChatConfig(kind="preference"))
        except ConfigError:
            raise refused from None


def _predicted(
    plan_of: "Callable[[Method], Plan]", names: "Sequence[Method]"
) -> Iterator[MethodPredicted]:
    """Yield what each method needs, up to the first that fits."""
    from headrace.cli.plans import place
    from headrace.predict.prediction import predict

    for name in names:
        plan = plan_of(name)
        try:
            method = MethodPredicted(name, plan, predict(plan, *place(plan)))
        except UnsupportedError as error:
            if len(names) == 1:
                raise
            method = MethodPredicted(name, plan, None, error.message)
        yield method
        if method.fits in ("yes", "tight"):
            return


def too_large(method: MethodPredicted) -> UnsupportedError:
    """Return the error of a model that fits in no method."""
    assert method.prediction is not None
    memory = method.prediction.memory
    needs, has = format_bytes(memory.peak_bytes), format_bytes(memory.capacity_bytes)
    return UnsupportedError(
        f"{method.name} needs {needs} at {memory.peak_at}, and the device has {has}",
        "--with full_checkpoint, or batch.micro_sequences=1, or a smaller data.sequence_length",
    )


def with_steps(
    plan: "Plan", given: frozenset[str], epochs: float | None, progress: "Progress"
) -> "Plan":
    """Return the plan with as many steps as the epochs take; the data is prepared for it.

    Epochs that were typed replace the plan's own count of steps or tokens; other limits stay, and
    the first that is reached ends the run.

    Args:
        plan: what would be trained.
        given: keys that the command sets.
        epochs: passes over the data; None where the command names none. A plan that says when it
            ends stays as it is then.
        progress: takes what was counted.

    Raises:
        ConfigError: the command names epochs and a count of steps or tokens.
    """
    from headrace.data.ingest import prepare

    if epochs is not None and (counts := sorted(given & COUNTS)):
        raise ConfigError(
            f"--epochs {epochs:g} and {counts[0]} both say how much is trained",
            rerun_without("--epochs", verb="finetune"),
        )
    if epochs is None and (given & ENDS or plan.goal.steps or plan.goal.tokens):
        return plan
    epochs = EPOCHS if epochs is None else epochs
    prepared = prepare(plan, progress=progress.task)
    tokens = sum(part.tokens for part in prepared.train)
    steps = max(1, ceil(epochs * tokens / plan.batch.tokens))
    progress.note(f"{epochs:g} epochs of {tokens:,} tokens are {steps:,} steps")
    goal = {"goal.steps": steps, "goal.tokens": None}
    return _with_keys(plan, {**goal, **_scheduled(steps)}, given)


def with_its_schedule(plan: "Plan", given: frozenset[str]) -> "Plan":
    """Return the plan with a schedule that ends with it, where the command says its steps alone.

    Args:
        plan: what would be trained.
        given: keys that the command sets.
    """
    steps, end = plan.goal.steps, plan.schedule.steps
    if "goal.steps" not in given or steps is None or end is None or steps >= end:
        return plan
    return _with_keys(plan, _scheduled(steps), given)


def _scheduled(steps: int) -> dict[str, Any]:
    """Return the keys of a schedule and of evaluations that so many steps have room for."""
    return {
        "schedule.steps": steps,
        "schedule.warmup_steps": min(10, steps // 10),
        "eval.every_steps": max(1, min(50, steps // 4)),
    }


def _with_keys(plan: "Plan", wanted: dict[str, Any], given: frozenset[str]) -> "Plan":
    """Return the plan with other values of keys that the command does not set."""
    tables: dict[str, dict[str, Any]] = {}
    for key, value in wanted.items():
        if key not in given:
            table, _, leaf = key.partition(".")
            tables.setdefault(table, dict(getattr(plan, table)))[leaf] = value
    return plan.replaced(**tables)


def _rows_of(chosen: Chosen) -> list[list[str]]:
    rows = []
    for method in chosen.methods:
        step_s = method.prediction.time.step_s if method.prediction else None
        peak = format_bytes(method.prediction.memory.peak_bytes) if method.prediction else "-"
        step = "-" if step_s is None else format_seconds(step_s)
        taken = "taken" if method is chosen.method else method.reason
        rows.append([method.name, peak, method.fits, step, taken])
    return rows


def _show_methods(chosen: Chosen) -> None:
    """Print what each method needs, and which is taken."""
    show_table(["method", "memory", "fits", "step", ""], _rows_of(chosen))


def _show_plan(plan: "Plan", chosen: Chosen, *, as_json: bool) -> None:
    """Print the plan as TOML, or with what it was chosen from as JSON."""
    if as_json:
        show_json({"plan": plan.dump(), "methods": [method.to_dict() for method in chosen.methods]})
        return
    _show_methods(chosen)
    print(plan.to_toml())


def _documentation() -> str:
    """Write questions and answers on every technique, and return the file."""
    from headrace.catalogue.questions import write_questions

    return str(write_questions(catalogue(), Path("data") / "headrace-questions.jsonl"))


def _pairs_line(last: dict[str, Any], before: dict[str, Any] | None) -> str:
    """Return how the held-out pairs are ranked after the last step, and were before the first."""
    was = f" ({before['chosen_likelier']:.0%} before)" if before else ""
    return (
        f"of {last['pairs']:.0f} held-out pairs the chosen answer is the likelier one in "
        f"{last['chosen_likelier']:.0%}{was}; rewards rank {last['ranked_right']:.0%} right, and "
        f"are {last['reward_margin']:.3g} apart"
    )


def show_tuned(
    result: "Result",
    plan: "Plan",
    closing: "Closing",
    progress: "Progress",
    *,
    as_json: bool,
    **more: Any,
) -> None:
    """Print what a run that was tuned gained, by one rank.

    Args:
        result: the run.
        plan: what was trained.
        closing: guards the end of the command.
        progress: has what was told on the way.
        as_json: print one JSON value.
        more: further JSON values.
    """
    if not result.first:
        return
    conclusion = result.conclude(closing, note)
    if as_json:
        show_json({**conclusion.report, **more, "told": progress.notes})
    else:
        note(words_of_tuned(result.folder, conclusion, talks=plan.data.chat is not None))


def words_of_tuned(folder: Path, conclusion: "Conclusion", *, talks: bool) -> str:
    """Return the text that ends a fine-tuning: what it gained, and what to type next."""
    report = conclusion.report
    before, last = report["before"], report["val"][-1]
    lines = ["", f"validation: {last['loss_nats']:.3f} nats per token"]
    if before:
        lines[-1] += f", {before['loss_nats']:.3f} before"
    if "pairs" in last:
        lines.append(_pairs_line(last, before))
    if (general := report["general"]) and general["after_nats"] is not None:
        rose = f"{general['after_nats']:.3f} nats per token, {general['before_nats']:.3f} before"
        lines.append(f"general text: {rose}")
    lines += verdict_lines(conclusion.verdict)
    speak = "chat" if talks else "sample"
    lines.append(f"report: {conclusion.page or folder / 'report.json'}")
    lines.append(f"next:   {started_as()} {speak} {folder}")
    lines.append(f"        {started_as()} export {folder} --to hf")
    return "\n".join(lines)

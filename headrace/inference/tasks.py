"""Score a trained run on sets of questions: the likelihood of every answer, and no text sampled.

A set is a file of JSON lines, each of one of three forms:

- multiple choice: `query`, `choices` and `gold`, the number of the right choice;
- schema: `context_options`, one `continuation`, and `gold`, the number of the right context;
- cloze: `context` and `continuation`, which is right where greedy decoding would write it.

The numbers are those of lm-evaluation-harness on the same model and prompts: how a prompt and its
answer are cut into tokens, what is left out of prompts that are too long, `acc` by the summed log
likelihood, `acc_norm` by that per character of a choice, and their standard errors. As in training,
the document token stands before each prompt (there: `add_bos_token=True`).

Source: github.com/EleutherAI/lm-evaluation-harness (Gao et al., doi 10.5281/zenodo.10256836).
"""

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.progress import OnProgress
from headrace.data.tokenizer import Tokenizer
from headrace.inference.continuations import Continuation, sum_losses

FORMS = {
    "multiple choice": ("query", "choices", "gold"),
    "schema": ("context_options", "continuation", "gold"),
    "cloze": ("context", "continuation"),
}
"""Maps a form to its keys."""
MOST_CHOICES = 100
"""The most choices of a question."""


@dataclass(frozen=True)
class Question:
    """Hold a question as the pairs of texts whose second part is to be likely.

    Args:
        pairs: (prompt, what may follow it), one for each choice.
        gold: the number of the right pair; None where the only one is to be the likeliest text.
        lengths: characters of each choice, without what stands before it.
    """

    pairs: list[tuple[str, str]]
    gold: int | None
    lengths: list[int]


@dataclass(frozen=True)
class Task:
    """Hold a set of questions of one form."""

    name: str
    form: str
    questions: list[Question]


@dataclass(frozen=True)
class Score:
    """Hold what a run has in one task; `errors` are standard errors.

    Args:
        name: the task's.
        form: its form, a key of `FORMS`.
        questions: how many were asked.
        values: measure -> value. Shares are of 1; perplexity is per answer.
        errors: measure -> standard error of its mean, where it has one.
        chance: the share that guesses get right; None where nothing can be guessed.
        shortened: prompts whose beginning was left out, since they are longer than the run's rows.
        left_out: questions that were not asked, since an answer alone is longer than these.
    """

    name: str
    form: str
    questions: int
    values: dict[str, float]
    errors: dict[str, float] = field(default_factory=dict)
    chance: float | None = None
    shortened: int = 0
    left_out: int = 0

    def to_dict(self) -> dict[str, Any]:
        """Return its fields as JSON takes them."""
        return vars(self)


# --- what is asked ---------------------------------------------------------------------------


def task_files(paths: Iterable[Path]) -> list[Path]:
    """Return the files of tasks: each path that is one, and the `.jsonl` files of each folder.

    Raises:
        ConfigError: there is no such path, or a folder has none.
    """
    files: list[Path] = []
    for path in paths:
        own = sorted(path.glob("*.jsonl")) if path.is_dir() else [path] * path.is_file()
        if not own:
            has = f"the folder {path} has no .jsonl file" if path.is_dir() else f"no file {path}"
            raise ConfigError(
                f"--tasks takes files of questions or folders of them: {has}", "--tasks FILE.jsonl"
            )
        files += own
    return files


def read_task(file: Path, delimiter: str = " ", limit: int | None = None) -> Task:
    """Return the questions of a file.

    Args:
        file: JSON lines.
        delimiter: what stands between a prompt and an answer.
        limit: the most questions, from the first on.

    Raises:
        ConfigError: a line is no question, is of another form than the first, or there is none.
    """
    questions: list[Question] = []
    form = None
    try:
        with file.open(encoding="utf-8-sig") as stream:
            for number, line in enumerate(stream, 1):
                if len(questions) == limit:
                    break
                if not line.strip():
                    continue
                try:
                    own, question = _question(json.loads(line), delimiter)
                    if own != (form := form or own):
                        raise ValueError(f"it is {own}, and the first line is {form}")
                except (ValueError, RecursionError) as error:
                    raise ConfigError(
                        f"line {number} of {file} is no question: {error}",
                        f"sed -i {number}d {shell(file)}",
                    ) from None
                questions.append(question)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{file} cannot be read: {error}", "--tasks FILE.jsonl") from None
    if form is None:
        raise ConfigError(f"{file} has no question", "--tasks FILE.jsonl")
    return Task(file.stem, form, questions)


def _question(row: Any, delimiter: str) -> tuple[str, Question]:
    """Return the form of one line, and what it asks; a ValueError says what is wrong."""
    keys = row if isinstance(row, dict) else {}
    form = next((form for form, needs in FORMS.items() if {*needs} <= {*keys}), None)
    if form is None:
        forms = "; ".join(", ".join(needs) for needs in FORMS.values())
        raise ValueError(f"its keys are {', '.join(map(str, keys)) or 'none'}, not {forms}")
    if form == "cloze":
        context, answer = (_text(row, key) for key in FORMS[form])
        return form, Question([(context, delimiter + answer)], None, [len(answer)])
    choices = row["choices" if form == "multiple choice" else "context_options"]
    if not isinstance(choices, list) or not 2 <= len(choices) <= MOST_CHOICES:
        raise ValueError(f"it needs 2 to {MOST_CHOICES} choices")
    if not all(isinstance(choice, str) for choice in choices):
        raise ValueError("a choice is no text")
    gold = row["gold"]
    if not isinstance(gold, int) or isinstance(gold, bool) or not 0 <= gold < len(choices):
        raise ValueError(f"gold = {gold!r} is no number of one of {len(choices)} choices")
    if form == "schema":
        answer = _text(row, "continuation")
        pairs = [(context, delimiter + answer) for context in choices]
        return form, Question(pairs, gold, [len(answer)] * len(choices))
    query = _text(row, "query")
    if not all(choices):
        raise ValueError("a choice is empty")
    pairs = [(query, delimiter + choice) for choice in choices]
    return form, Question(pairs, gold, [len(choice) for choice in choices])


def _text(row: dict[str, Any], key: str) -> str:
    if not isinstance(row[key], str) or (key == "continuation" and not row[key]):
        raise ValueError(f"{key} = {row[key]!r} is no text")
    return row[key]


# --- what the model answers ------------------------------------------------------------------


def score_tasks(build: Build, tasks: Sequence[Task], progress: OnProgress) -> list[Score]:
    """Return what a run has in each task.

    Args:
        build: a run that `open_model` opened.
        tasks: what `read_task` returned.
        progress: as `sum_losses` takes it.

    Raises:
        ConfigError: an answer has no token of its own, or all are longer than the run's rows.
    """
    most = build.plan.data.sequence_length + 1
    asked = [_asked(build.prepared.tokenizer, task, most) for task in tasks]
    continuations: list[Continuation] = []
    for one in asked:
        for ids, count in one.pairs:
            kept = ids[-most:]
            continuations.append(Continuation(kept, len(kept) - count, len(continuations)))
    sums = sum_losses(build, continuations, len(continuations), progress)
    answers = iter(zip(sums.nats, sums.missed, strict=True))
    return [
        _score(
            task,
            one,
            [[next(answers) for _ in question.pairs] for question in one.questions],
            sum(len(ids) > most for ids, _ in one.pairs),
        )
        for task, one in zip(tasks, asked, strict=True)
    ]


@dataclass(frozen=True)
class _Asked:
    """Hold the questions of a task whose answers a row has room for, and their tokens."""

    questions: list[Question]
    pairs: list[tuple[np.ndarray, int]]


def _asked(tokenizer: Tokenizer, task: Task, most: int) -> _Asked:
    """Return what is asked of a task, where a row has `most` tokens with its last target.

    Raises:
        ConfigError: an answer has no token of its own, or no question has room.
    """
    made = iter(encode_pairs(tokenizer, [pair for q in task.questions for pair in q.pairs]))
    kept = _Asked([], [])
    longest = 0
    for question in task.questions:
        pairs = [next(made) for _ in question.pairs]
        for (_, count), (_, answer) in zip(pairs, question.pairs, strict=True):
            if not count:
                raise ConfigError(
                    f"an answer of {task.name} has no token of its own: {answer[:60]!r}",
                    "--tasks FILE.jsonl without it",
                )
            longest = max(longest, count)
        if max(count for _, count in pairs) < most:
            kept.questions.append(question)
            kept.pairs.extend(pairs)
    if not kept.questions:
        raise ConfigError(
            f"every question of {task.name} has an answer that is longer than the run's rows of "
            f"{most - 1} tokens; the longest has {longest}",
            "--tasks FILE.jsonl of short answers",
        )
    return kept


def encode_pairs(
    tokenizer: Tokenizer, pairs: Sequence[tuple[str, str]]
) -> list[tuple[np.ndarray, int]]:
    """Return the tokens of prompts with what follows, and how many of the last are what follows.

    Blanks that end a prompt count to what follows. The prompt is cut by itself, and the tokens that
    the whole has more stand behind it. Where a tokenizer joins both ("." with the end of a line),
    the joined part is lost, there as here: a prompt is best without blanks at its end. The document
    token stands first.
    """
    moved = [_moved(*pair) for pair in pairs]
    wholes = tokenizer.encode_batch([before + after for before, after in moved])
    alone = tokenizer.encode_batch([before for before, _ in moved])
    first = np.array([tokenizer.document_token], dtype=np.int64)
    return [
        (np.concatenate((first, prompt, whole[len(prompt) :])), max(0, len(whole) - len(prompt)))
        for whole, prompt in zip(wholes, alone, strict=True)
    ]


def _moved(before: str, after: str) -> tuple[str, str]:
    stripped = before.rstrip()
    return stripped, before[len(stripped) :] + after


def _score(
    task: Task, asked: _Asked, answers: list[list[tuple[float, int]]], shortened: int
) -> Score:
    """Return a task's measures from the nats and the misses of every answer."""
    questions = asked.questions
    extra: dict[str, float] = {}
    chance = None
    if task.form == "cloze":
        nats = [one for ((one, _),) in answers]
        shares = {"acc": [float(missed == 0) for ((_, missed),) in answers]}
        extra["perplexity"] = _exp(sum(nats) / len(nats))
    else:
        costs = [[nats for nats, _ in each] for each in answers]
        shares = {"acc": _right(questions, costs, by_length=False)}
        if task.form == "multiple choice":
            shares["acc_norm"] = _right(questions, costs, by_length=True)
        chance = sum(1 / len(q.pairs) for q in questions) / len(questions)
    values = {name: sum(each) / len(each) for name, each in shares.items()}
    errors = {name: _standard_error(each) for name, each in shares.items() if len(each) > 1}
    return Score(
        task.name,
        task.form,
        len(answers),
        values | extra,
        errors,
        chance,
        shortened=shortened,
        left_out=len(task.questions) - len(questions),
    )


def _right(
    questions: Sequence[Question], costs: Sequence[list[float]], *, by_length: bool
) -> list[float]:
    """Return 1 for each question whose right choice costs the fewest nats, else 0."""
    right = []
    for question, nats in zip(questions, costs, strict=True):
        if by_length:
            nats = [one / length for one, length in zip(nats, question.lengths, strict=True)]
        right.append(float(nats.index(min(nats)) == question.gold))
    return right


def _exp(nats: float) -> float:
    return math.exp(nats) if nats < 700 else math.inf


def _standard_error(values: Sequence[float]) -> float:
    """Return the standard error of a mean, of at least two values."""
    return float(np.std(values, ddof=1) / math.sqrt(len(values)))

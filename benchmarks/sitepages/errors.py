"""Make the page of errors from the places of the package that raise them.

The package's syntax trees say which kinds of errors there are, what each place says and what it
tells a user to do. What is only known when the error is raised stands as `<name>`.
"""

import ast
import re
from bisect import bisect_left
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from scoring.tables import markdown

from headrace.core.errors import RefusalKind
from sitepages.spoken import LETTERS, Speaker, letters

BASE, REFUSAL, WRONG = "HeadraceError", "Unsupported", "Wrong"
"""Names of the base of all errors, of a technique's refusal, and of a plan's own check."""
CODES = {"EXIT_FAILED": 1, "EXIT_PLAN": 2, "EXIT_UNSUPPORTED": 3}
"""Name of an exit code -> the number."""
AREAS: Mapping[str, str] = {
    "plan": "The plan and its keys",
    "core": "Files, folders and the system",
    "data": "Text, tokenizers and shards",
    "model": "Models and weights of others",
    "techniques": "Techniques that cannot stand in this plan, or here",
    "assemble": "Making the model",
    "parallel": "Several ranks",
    "optim": "Optimizers",
    "train": "A run",
    "inference": "Loading and sampling",
    "export": "Files for other programs",
    "compress": "Fewer bits",
    "costs": "Rates and predictions of work",
    "predict": "Predicting a plan",
    "doctor": "The doctor",
    "tuner": "The tuner",
    "report": "Reports",
    "probes": "Probing a machine",
    "watch": "Watching another loop",
    "launch": "Clusters",
    "migrate": "Configs of other trainers",
    "api": "From Python",
    "cli": "What is typed",
    "catalogue": "What is known by name",
    "recipes": "Recipes",
    "ui": "Runs in a browser",
}
"""Folder of the package -> title of its errors, in the order of the page."""
HELPS: Mapping[str, str] = {
    "HeadraceError": "the command behind `try:`",
    "RunError": "`headrace train PLAN --resume`, once what it names is mended",
    "Diverged": "`headrace doctor RUN`, which says what made it and the keys that learn",
    "ConfigError": "what stands behind `try:`; `headrace explain PLAN` checks the plan",
    "TextLost": "`data.lossy_tokenizer=true`, or `data.tokenizer=bpe`",
    "UnsupportedError": "what stands behind `try:`; `headrace plan PLAN --sweep` ranks what runs",
    "MemoryFull": "torch or the host said `out of memory`: `batch.micro_sequences=N` with a "
    "smaller N, or `--with selective_checkpoint`",
    "NoMoreThreads": "`data.workers=0`, and `OMP_NUM_THREADS=1` before the command",
    "Stopped": "`headrace train PLAN --resume`",
    "RankHung": "`headrace train PLAN --resume`; `mesh.patience_s=N` waits longer",
    "RankLost": "`headrace train PLAN --resume`",
    "RankGone": "`headrace train PLAN --resume`",
    "CopiesDiffer": "`headrace train PLAN --resume --checkpoint step-N`, the one that it names",
    "RecordDamaged": "the command that makes the data again, which it names",
    "NotJson": "mend the line that it names",
    "OtherFormat": "`headrace data ingest PLAN`, which writes the shards again",
    "OutsideFolder": "`headrace ui FOLDER`, of the folder that the run lies in",
    "RunEnded": "load the page again: it shows the report",
    "PredictionFailed": "leave the technique out, and report it: it is a bug of ours",
    "Wrong": "the key that it names",
    "Unsupported": "what stands behind `try:`; `headrace explain --matrix` lists what fits",
}
"""Kind of error -> what mends it most often. An error itself says more."""


NAMES = "|".join(HELPS)
MAKES = re.compile(rf"\b(?:{NAMES})\(|class .*\((?:{NAMES}|StrEnum)\)")
"""What a file says that makes an error or defines a kind of it."""
CALLS = re.compile(rf"\b(?:{NAMES})\(")
"""What a line says that makes an error."""
FRONT = ("---", "hide:", "  - navigation", "search:", "  boost: 10", "---", "")
"""Lines before the text: the page is no section's, and a search for a message finds it."""
IN_MESSAGE = "what the message says"


@dataclass(frozen=True)
class ErrorKind:
    """Hold a class of errors: its name, its base, its meaning, and its exit code."""

    name: str
    base: str
    meaning: str
    exit_code: str


@dataclass(frozen=True)
class ErrorPlace:
    """Hold one place of the package that makes an error, and what it says there."""

    area: str
    kind: str
    message: str
    remedy: str


def errors_page(package: Path) -> str:
    """Return the page as Markdown.

    Args:
        package: the folder of the package.
    """
    texts = {file: file.read_text() for file in sorted(package.rglob("*.py"))}
    trees = {file: ast.parse(text) for file, text in texts.items() if MAKES.search(text)}
    by_name = error_classes(trees)
    places = [
        place
        for file, tree in trees.items()
        for place in _places(tree, texts[file], file.relative_to(package), by_name)
    ]
    clear = [place for place in places if place.message]
    lines = [
        *FRONT,
        "# Troubleshooting",
        "",
        "A mistake ends in one message: what was asked, what was found, and behind `try:` what to "
        "type. A traceback is a bug of ours. **Look for some words of your message here**, with "
        "the search of this site or of your browser; a part in angle brackets is different each "
        "time.",
        "",
        "```text",
        "error: batch.tokens = 100 is not a multiple of data.sequence_length x mesh.data = 128 x 1 "
        "tokens; the nearest is batch.tokens=128",
        "  try: batch.tokens=128",
        "```",
        "",
        "A run that is slow, or that learns badly, is no error: ask `headrace doctor RUN`, and see "
        "[Which optimization, when?](which.md).",
        "",
        "## Kinds of errors",
        "",
        "`--json` gives the exit code as `exit_code`, and the message as `error`.",
        "",
        markdown(("kind", "exit code", "what it means", "what mends it"), _kind_rows(by_name)),
        "A run that a signal stopped ends with 75 in a job of a scheduler, 129 after a hangup, "
        "130 after Ctrl-C and 143 after SIGTERM; its checkpoint is saved.",
        "",
        "A technique that cannot run has a reason of one of these kinds:",
        "",
        markdown(("kind of refusal", "what it is about"), _refusal_rows(trees)),
        "## By message",
        "",
        f"{len(clear)} messages, made from the places of the package that say them. "
        f"{len(places) - len(clear)} more are passed on from a place that is in this list, or are "
        "another library's words.",
        "",
    ]
    for area, title in AREAS.items():
        here = [place for place in clear if place.area == area]
        if here:
            lines += [f"### {title}", "", markdown(("message", "kind", "try"), _rows(here))]
    return "\n".join(lines).rstrip() + "\n"


def _kind_rows(by_name: Mapping[str, ErrorKind]) -> list[tuple[str, str, str, str]]:
    return [
        (f"`{kind.name}`", kind.exit_code, kind.meaning, HELPS.get(kind.name, HELPS[BASE]))
        for kind in by_name.values()
    ]


def _refusal_rows(trees: Mapping[Path, ast.Module]) -> list[tuple[str, str]]:
    """Return the kinds of refusals, each with the words that stand below it in the source."""
    bodies = [
        node.body
        for tree in trees.values()
        for node in tree.body
        if isinstance(node, ast.ClassDef) and node.name == RefusalKind.__name__
    ]
    meanings = dict[str, str]()
    for body in bodies:
        for before, after in pairwise(body):
            if isinstance(before, ast.Assign) and isinstance(after, ast.Expr):
                meanings[ast.literal_eval(before.value)] = ast.literal_eval(after.value)
    return [(f"`{kind.value}`", meanings[kind.value]) for kind in RefusalKind]


def _rows(places: list[ErrorPlace]) -> list[tuple[str, str, str]]:
    counted = Counter((place.message, place.kind, place.remedy) for place in places)
    return [
        (_code(message), kind, _code(remedy) or IN_MESSAGE)
        for message, kind, remedy in sorted(counted)
    ]


def _code(text: str) -> str:
    """Return a text as code in a cell of a table."""
    text = " ".join(text.split())
    if not text:
        return ""
    fence = "``" if "`" in text else "`"
    space = " " if "`" in text else ""
    return f"{fence}{space}{text}{space}{fence}"


def error_classes(trees: Mapping[Path, ast.Module]) -> dict[str, ErrorKind]:
    """Return every kind of error that a user is shown, by its name, a base before its children."""
    classes = [
        node for tree in trees.values() for node in tree.body if isinstance(node, ast.ClassDef)
    ]
    by_name = {BASE: ErrorKind(BASE, "", "", "1")}
    grown = True
    while grown:
        grown = False
        for node in classes:
            base = next((b.id for b in node.bases if isinstance(b, ast.Name)), "")
            known = node.name in by_name and by_name[node.name].meaning
            if not known and (node.name == BASE or base in by_name):
                by_name[node.name] = _kind(node, base, by_name)
                grown = True
    others = {
        node.name: _kind(node, "", by_name) for node in classes if node.name in (WRONG, REFUSAL)
    }
    return by_name | others


def _kind(node: ast.ClassDef, base: str, by_name: Mapping[str, ErrorKind]) -> ErrorKind:
    meaning = (ast.get_docstring(node) or "").split("\n\n")[0].split("\n")[0]
    code = (
        by_name[base].exit_code
        if base in by_name
        else {WRONG: "2", REFUSAL: "3"}.get(node.name, "1")
    )
    for item in node.body:
        target = getattr(item, "target", None) or next(iter(getattr(item, "targets", [])), None)
        if isinstance(target, ast.Name) and target.id == "exit_code":
            code = str(CODES[getattr(item, "value").id])  # noqa: B009
    if node.name == "Stopped":
        code = "75, 129, 130, 143"
    return ErrorKind(node.name, base, meaning, code)


def _places(
    tree: ast.Module, text: str, file: Path, by_name: Mapping[str, ErrorKind]
) -> Iterator[ErrorPlace]:
    """Yield the places of a file that make an error."""
    speaker = Speaker(tree)
    lines = [number for number, line in enumerate(text.splitlines(), 1) if CALLS.search(line)]
    for call, function in _calls(tree, lines):
        name = getattr(call.func, "id", getattr(call.func, "attr", ""))
        if name not in by_name or (name == REFUSAL and not call.args):
            continue
        given = {keyword.arg: keyword.value for keyword in call.keywords}
        first = call.args[0] if call.args else given.get("message", given.get("reason"))
        second = call.args[1] if len(call.args) > 1 else given.get("remedy")
        message = speaker.text(first, function) if first is not None else ""
        remedy = speaker.remedy(second, function) if second is not None else ""
        area = file.parts[0] if len(file.parts) > 1 else "cli"
        clear = letters(message) >= LETTERS
        yield ErrorPlace(
            area, name, message if clear else "", remedy if letters(remedy) > 1 else ""
        )


def _calls(
    tree: ast.Module, lines: Sequence[int]
) -> Iterator[tuple[ast.Call, ast.FunctionDef | None]]:
    """Yield the calls that begin on some lines, each with the function that it stands in.

    Args:
        tree: a file.
        lines: numbers of the lines, in order; what spans none of them is not looked at.
    """
    waiting: list[tuple[ast.AST, ast.FunctionDef | None]] = [(tree, None)]
    while waiting:
        node, function = waiting.pop()
        for child in ast.iter_child_nodes(node):
            first, last = getattr(child, "lineno", 0), getattr(child, "end_lineno", 0)
            at = bisect_left(lines, first)
            if not first or at == len(lines) or lines[at] > last:
                continue
            if isinstance(child, ast.Call):
                yield child, function
            waiting.append((child, child if isinstance(child, ast.FunctionDef) else function))

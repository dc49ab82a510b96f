"""Say why each line of a plan stands: what was measured of it, or the source that it rests on.

A line is a technique, or a key whose value is not the default. The newest receipt of
`learning.json` counts first: how many times sooner a target was reached with the line than without
it. `benchmarks/learning_page.py` writes that file from the rows of results/learning.jsonl. Next
come the receipts of a technique's card, then the card's source; a key has that of the technique
that would set it so. What has none of these is told as such.
"""

import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from headrace.core.strict import meanings
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Technique

RECEIPTS = Path(__file__).parent / "learning.json"
"""What lines of recipes were measured to buy."""
PLACES = ("name", "directory", "device", "data.sources", "data.validation", "data.directory")
"""Keys that say where and not how a run is."""
RestsOn = Literal["receipt", "card receipt", "source", "none"]


@dataclass(frozen=True)
class LearningReceipt:
    """Hold how many times sooner a target was reached with a line of a recipe.

    Args:
        line: a technique's name, or a key.
        change: how the recipe was changed: "added", "left out" or "set".
        ratio: seconds without the line over seconds with it, and of a key that was set over those
            with the recipe's own value; None where no seed had both.
        low: lower end of its interval of 95%.
        high: upper end; None where there is none.
        verdict: "helps", "hurts" or "not shown".
        n: seeds.
        hardware: the device.
        shape: the model's shape.
        date: day of the measurement.
        commit: of the code.
        set_to: what a key was set to, as JSON; "" of a technique.
    """

    line: str
    change: str
    ratio: float | None
    low: float | None
    high: float | None
    verdict: str
    n: int
    hardware: str
    shape: str
    date: str
    commit: str | None
    set_to: str = ""

    def of(self, value: Any) -> "LearningReceipt":
        """Return the receipt of a line with this value: the other way round where it was set so."""
        if not self.set_to or json.loads(self.set_to) != json.loads(json.dumps(value)):
            return self
        ratio, low, high = (1 / end if end else None for end in (self.ratio, self.high, self.low))
        verdict = {"helps": "hurts", "hurts": "helps"}.get(self.verdict, self.verdict)
        return replace(self, ratio=ratio, low=low, high=high, verdict=verdict)

    @property
    def text(self) -> str:
        """Return the receipt in words."""
        where = f"{self.n} seeds, {self.shape}, {self.hardware}, {self.date}"
        if self.ratio is None:
            return f"{self.verdict}: the target was not reached by one side ({where})"
        ends = "no interval" if self.low is None else f"{self.low:.2f}x to "
        ends += "" if self.low is None else f"{self.high:.2f}x" if self.high else "no end"
        return f"{self.verdict}: the target {self.ratio:.2f}x sooner with it ({ends}; {where})"


@dataclass(frozen=True)
class LineReason:
    """Hold why one line of a plan stands.

    Args:
        line: the technique's name, or the key.
        value: the technique's knobs that are not defaults, or the key's value.
        evidence: what the line rests on.
        text: the receipt or the source in words; what the key means where there is neither.
    """

    line: str
    value: Any
    evidence: RestsOn
    text: str


def read_learning(file: Path = RECEIPTS) -> dict[str, LearningReceipt]:
    """Return line -> its receipt."""
    rows = json.loads(file.read_text())
    return {row["line"]: LearningReceipt(**row) for row in rows}


def reasons(plan: Plan, known: Catalogue, file: Path = RECEIPTS) -> list[LineReason]:
    """Return why each line of a plan stands, its techniques first.

    Args:
        plan: the plan.
        known: every technique.
        file: the receipts of lines.
    """
    measured, why = read_learning(file), list[LineReason]()
    for name, technique in plan.techniques.items():
        knobs = technique.model_dump(mode="json", exclude_defaults=True)
        evidence, text = _of_technique(type(technique), measured)
        why.append(LineReason(name, knobs, evidence, text))
        for knob, value in knobs.items():
            key = f"techniques.{name}.{knob}"
            if key in measured:
                why.append(LineReason(key, value, "receipt", measured[key].of(value).text))
    made = {key for keys in plan.made().values() for key in keys}
    setters = _setters(plan, known)
    for key, value, meaning in _keys(plan):
        if key in made or key in PLACES:
            continue
        if key in measured:
            why.append(LineReason(key, value, "receipt", measured[key].of(value).text))
        elif (setter := setters.get((key, repr(value)))) is not None:
            evidence, text = _of_technique(setter, measured)
            why.append(LineReason(key, value, evidence, f"as {setter.name()}: {text}"))
        else:
            why.append(LineReason(key, value, "none", meaning))
    return why


def format_reasons(why: list[LineReason]) -> list[str]:
    """Return the reasons as lines of text."""
    words = {"source": "no receipt; source: ", "none": "no receipt; it is: "}
    lines = ["why each line stands:"]
    for one in why:
        if isinstance(one.value, Mapping):
            knobs = ", ".join(f"{knob}={value}" for knob, value in one.value.items())
            lines.append(f"  {one.line}" + (f" ({knobs})" if knobs else ""))
        else:
            lines.append(f"  {one.line} = {one.value}")
        lines.append(f"    {words.get(one.evidence, '')}{one.text}")
    return lines


def to_dicts(why: list[LineReason]) -> list[dict[str, Any]]:
    """Return the reasons as JSON values."""
    return [asdict(one) for one in why]


def _of_technique(
    technique: type[Technique[Any]], measured: Mapping[str, LearningReceipt]
) -> tuple[RestsOn, str]:
    """Return the best evidence that there is for a technique."""
    if technique.name() in measured:
        return "receipt", measured[technique.name()].text
    card = technique.card
    own = [text for name in ("buys", "costs", "hurts") for text in card.measured(name)]
    return ("card receipt", "; ".join(own)) if own else ("source", card.source)


def _setters(plan: Plan, known: Catalogue) -> dict[tuple[str, str], type[Technique[Any]]]:
    """Return (key, its value) -> the technique that would set it alone, with default knobs."""
    setters: dict[tuple[str, str], type[Technique[Any]]] = {}
    for technique in known.techniques.values():
        if technique.room in ("design", "schedule"):
            keys = technique().keys(plan)
            for key, value in keys.items() if len(keys) <= 2 else ():
                setters.setdefault((key, repr(value)), technique)
    return setters


def _keys(plan: Plan) -> Iterator[tuple[str, Any, str]]:
    """Yield each key whose value is not the default, with its value and its meaning."""

    def walk(table: Any, prefix: str) -> Iterator[tuple[str, Any, str]]:
        docs = meanings(type(table))
        for name, info in type(table).model_fields.items():
            value = getattr(table, name)
            if hasattr(type(value), "model_fields"):
                yield from walk(value, f"{prefix}{name}.")
            elif name != "techniques" and value != info.get_default(call_default_factory=True):
                yield f"{prefix}{name}", value, docs.get(name, "")

    yield from walk(plan, "")

"""Render what the doctor would change on a run's page, from its findings with their remedies."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field

from headrace.core.command import train_command
from headrace.core.errors import ConfigError
from headrace.core.files import parse_json, shell
from headrace.doctor.words.answer import SHARE_ENDS
from headrace.plan.changes import parse
from headrace.plan.technique import Effect
from headrace.report.page import Safe, join, muted, section, table, tag
from headrace.report.run_files import Table
from headrace.report.words import size

MOST = 3
"""Most remedies of a finding that the page shows."""
CHANGES = {"exact": "", "approximate": "; rounds otherwise", "learning": "; learns otherwise"}


class GainRecord(Table):
    """Hold the gain of a step's time, before over after, less 1, and the ends of its interval."""

    low: float
    value: float
    high: float


class RemedyRecord(Table):
    """Hold a change of the plan; see headrace.doctor.remedies."""

    change: tuple[Annotated[str, Field(min_length=1)], ...]
    what: str
    gain: GainRecord | None
    memory_bytes: float
    costs: str
    equality: Effect
    forecast_from: str = "ledger"
    unknown: str = ""


class FindingRecord(Table):
    """Hold a verdict with its remedies, the best first."""

    sentence: str
    evidence: str = ""
    remedies: tuple[RemedyRecord, ...] = ()


def remedies(folder: Path, *, commands: bool = False) -> Safe:
    """Render a section with what to change; empty where there are no remedies.

    Args:
        folder: the run's.
        commands: add for each change the command that trains the run's plan with it.

    Raises:
        ConfigError: findings.json is damaged.
    """
    return remedies_of(folder, _read(folder / "findings.json"), commands=commands)


def remedies_of(folder: Path, every: Iterable[FindingRecord], *, commands: bool = False) -> Safe:
    """Render such a section of findings that no file holds; see `remedies`."""
    findings = [finding for finding in every if finding.remedies]
    if not findings:
        return Safe("")
    parts: list[str] = []
    for finding in findings:
        rows = [
            (_words(one), _gain(one), _memory(one), one.costs + CHANGES[one.equality], one.what)
            for one in finding.remedies[:MOST]
        ]
        head = ("Change", "Forecast gain", "Memory", "Costs", "What it does")
        parts += [
            tag("p", tag("strong", finding.sentence), f" {finding.evidence}"),
            table(f"Remedies: {finding.sentence}", head, rows, text=5),
            *(_command(folder, one) for one in finding.remedies[:MOST] if commands),
        ]
    note = muted(
        "A gain is the time of a step before over after, less 1, on this run; the range holds 80% "
        f"of what such forecasts came to, but where it says {SHARE_ENDS}: of what the finding says "
        "is lost, and nobody measured how often that holds."
    )
    return section("What to change", join(parts), note)


def _words(remedy: RemedyRecord) -> Safe:
    return tag("code", " ".join(parse(remedy.change).command()))


def _command(folder: Path, remedy: RemedyRecord) -> Safe:
    words = map(shell, parse(remedy.change).command())
    return tag("pre", train_command(folder, *words), class_="command", tabindex="0")


def _gain(remedy: RemedyRecord) -> str:
    if (gain := remedy.gain) is None:
        return f"not forecast: {remedy.unknown}"
    ends = f"{gain.low:+.1%} to {gain.high:+.1%}"
    if remedy.forecast_from == "share":
        return f"{ends} ({SHARE_ENDS})"
    return f"{gain.value:+.1%} ({ends})"


def _memory(remedy: RemedyRecord) -> str:
    sign = "+" if remedy.memory_bytes > 0 else "-"
    return f"{sign}{size(abs(remedy.memory_bytes))}" if remedy.memory_bytes else "as it is"


def _read(file: Path) -> list[FindingRecord]:
    if not file.is_file():
        return []
    try:
        rows: list[dict[str, Any]] = parse_json(file.read_bytes())
        return [FindingRecord.model_validate(row) for row in rows]
    except (OSError, ValueError, TypeError) as error:
        raise ConfigError(
            f"{file} is damaged: {str(error).splitlines()[0]}",
            f"mv {shell(file)} {shell(f'{file}.damaged')}",
        ) from None

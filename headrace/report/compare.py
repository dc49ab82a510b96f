"""Write the page about several runs side by side, measured against the first.

Ratios are given only where both runs have the number. Losses are laid over each other in bits per
byte, which tokenizers do not move; when a run was never evaluated, nothing comparable is left but
nats per token, and the page says what that is worth.
"""

import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.files import recorded_plan, shell
from headrace.report.family import family_section
from headrace.report.loss import loss_section
from headrace.report.page import (
    Safe,
    join,
    legend,
    muted,
    page,
    section,
    swatch,
    table,
    tag,
    write_page,
)
from headrace.report.parts import COLOURS, phase_name, phase_stack, phases
from headrace.report.run_files import Report, RunFiles, read_run
from headrace.report.single import plain
from headrace.report.words import bits, count, dollars, percent, seconds, size, verdict, whole

DEFAULT_NAME = "comparison.html"
"""The page's name where the user gives none."""
LIMIT = 8
"""Most runs on one page: as many as there are colours that can be told apart."""

KeyFigure = tuple[str, Callable[[Report], float | None], Callable[[float | None], str]]
FIGURES: tuple[KeyFigure, ...] = (
    ("Time to the goal", lambda r: r.goal.wall_s if r.goal.reached else None, seconds),
    ("Best validation, bits per byte", lambda r: r.best_bits_per_byte, bits),
    ("Wall time", lambda r: r.wall_s, seconds),
    ("Steps", lambda r: r.steps, whole),
    ("Training tokens", lambda r: r.tokens, count),
    ("Tokens per second, median", lambda r: r.steady_tokens_per_s, whole),
    ("Model FLOPs utilization", lambda r: r.model_flops_utilization.value, percent),
    ("Peak memory", lambda r: r.peak_memory_bytes.allocated, size),
    ("Peak memory, predicted", lambda r: r.peak_memory_bytes.predicted, size),
    ("Wasted tokens", lambda r: r.wasted_token_fraction, percent),
    ("Parameters", lambda r: r.parameters, count),
)
COST: KeyFigure = ("Cost", lambda r: r.dollars, lambda v: "unknown" if v is None else dollars(v))


def compare_reports(run_directories: Sequence[Path], output: Path) -> Path:
    """Write one page with runs side by side, ratios against the first.

    Args:
        run_directories: two to eight runs' folders.
        output: the page to write.

    Returns:
        The page's path.

    Raises:
        ConfigError: too few or too many runs, a folder that is not a run, or an unreadable file.
        ConfigError, RunError: the page cannot be written.
    """
    if not 2 <= len(run_directories) <= LIMIT:
        message = f"a comparison takes 2 to {LIMIT} runs; {len(run_directories)} were given"
        given = " ".join(map(shell, run_directories[:LIMIT])) or "runs/*"
        to = "" if output.name == DEFAULT_NAME else f" --output {shell(output)}"
        raise ConfigError(message, f"headrace report {given}{to}")
    runs = [read_run(Path(directory)) for directory in run_directories]
    text = page(f"{len(runs)} runs compared - Headrace report", *comparison_sections(runs))
    return write_page(Path(output), text)


def comparison_sections(runs: list[RunFiles], *, within: Path | None = None) -> list[Safe]:
    """Return the sections of the page about several runs, with ratios against the first.

    Args:
        runs: the files of two to eight runs.
        within: relatives of the first run are shown where they lie in this folder; None shows all.

    Raises:
        ConfigError: the plan of one of them is not TOML.
    """
    names = _labels(runs)
    related = any(run.report.parent for run in runs)
    return [
        tag(
            "header",
            tag("p", "Headrace comparison", class_="eyebrow"),
            tag("h1", f"{len(runs)} runs side by side"),
            tag("p", f"Ratios are against the first, {names[0]}.", class_="verdict"),
        ),
        _verdicts(runs, names),
        _key_figures(runs, names),
        loss_section(runs, names),
        *(family_section(runs[0].directory, within) if related else ()),
        _time(runs, names),
        _differences("Plan keys that differ", [_plan(run, runs) for run in runs], names),
        _differences("Environment that differs", [_environment(run) for run in runs], names),
    ]


def _labels(runs: list[RunFiles]) -> list[str]:
    """Return one label per run: its name, with its folder where names repeat."""
    names = [run.report.name for run in runs]
    return [
        f"{name} ({run.directory})" if names.count(name) > 1 else name
        for name, run in zip(names, runs, strict=True)
    ]


def _mark(index: int, kind: str = "") -> Safe:
    """Return the mark of a run's colour."""
    return swatch(f"c{index}", kind)


def _verdicts(runs: list[RunFiles], names: list[str]) -> Safe:
    """Render each run's outcome in one sentence."""
    rows = []
    for index, (run, name) in enumerate(zip(runs, names, strict=True)):
        ruling = verdict(run.report)
        badge = tag("span", ruling.badge, class_=f"badge {ruling.tone}")
        rows.append((join((_mark(index), name)), badge, ruling.sentence))
    return section("Verdicts", table("Verdicts", ("Run", "Outcome", "In words"), rows, text=3))


def _key_figures(runs: list[RunFiles], names: list[str]) -> Safe:
    """Render key figures, one column per run."""
    priced = any(run.report.dollars is not None for run in runs)
    rows = []
    for title, read, form in (*FIGURES, COST) if priced else FIGURES:
        values = [read(run.report) for run in runs]
        first = values[0]
        cells = [form(first)]
        for value in values[1:]:
            ratio = f"{value / first:.2f}x" if first and value is not None else ""
            cells.append(join((form(value), " ", tag("span", ratio, class_="ratio"))))
        rows.append((title, *cells))
    heads = [join((_mark(i), name)) for i, name in enumerate(names)]
    streams = [run.report.stream_sha256 for run in runs]
    same = None not in streams and len(set(streams)) == 1
    note = "All runs read the same token stream." if same else "The token streams differ."
    if None in streams:
        note = "Whether the runs read the same token stream is unknown."
    return section("Key figures", table("Key figures", ("", *heads), rows), muted(note))


def _time(runs: list[RunFiles], names: list[str]) -> Safe:
    """Render where each run's time went, on one scale."""
    longest = max(sum(phases(run.report).values()) for run in runs)
    if not longest:
        return section("Where the time went", muted("Phases were not measured."))
    used = dict.fromkeys(phase for run in runs for phase in phases(run.report))
    bars = []
    for run, name in zip(runs, names, strict=True):
        total = sum(phases(run.report).values())
        bars.append(tag("h3", f"{name}: {seconds(total) if total else 'not measured'}"))
        bars.append(phase_stack(run.report, width=total / longest))
    marks = legend((swatch(COLOURS.get(p, "rule")), phase_name(p)) for p in used)
    return section("Where the time went", *bars, marks, muted("Bars share one scale."))


def _plan(run: RunFiles, runs: list[RunFiles]) -> dict[str, str]:
    """Return the plan's keys and values, flat.

    Args:
        run: whose plan it is.
        runs: all that are compared.

    Raises:
        ConfigError: plan.toml is not TOML.
    """
    try:
        return _flat(tomllib.loads(run.plan_toml))
    except (ValueError, RecursionError) as error:
        path = recorded_plan(run.directory)
        others = [shell(r.directory) for r in runs if r.directory != run.directory]
        aside = f"mv {shell(path)} {shell(f'{path}.damaged')}"
        raise ConfigError(
            f"{path} is not valid TOML: {error}",
            aside
            if path != run.directory / "plan.toml"
            else " ".join(["headrace report", *(others or ["RUN"])]),
        ) from None


def _environment(run: RunFiles) -> dict[str, str]:
    """Return the environment's keys and values, flat."""
    return _flat(run.environment)


def _flat(table: dict[str, Any], prefix: str = "") -> dict[str, str]:
    """Return nested tables as dotted keys; an empty table (a technique with no knobs) is 'on'."""
    flat: dict[str, str] = {}
    for key, value in table.items():
        if isinstance(value, dict) and value:
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = "on" if value == {} else plain(value)
    return flat


def _differences(title: str, tables: list[dict[str, str]], names: list[str]) -> Safe:
    """Render the keys whose values differ between runs."""
    keys = dict.fromkeys(key for values in tables for key in values)
    differ = [key for key in keys if len({values.get(key) for values in tables}) > 1]
    if not differ:
        return section(title, muted("None."))
    rows = [(key, *(values.get(key, "not set") for values in tables)) for key in differ]
    heads = [join((_mark(i), name)) for i, name in enumerate(names)]
    return section(title, table(title, ("Key", *heads), rows, text=len(names) + 1))

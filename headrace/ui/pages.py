"""Make the pages of `headrace ui` and their live parts, by the functions that make the reports."""

from pathlib import Path

from headrace.core.errors import ConfigError, HeadraceError, interpreting
from headrace.core.files import RECORDED, is_within, shell
from headrace.doctor.run import place_of
from headrace.inference.load import read_recorded_plan
from headrace.launch.follow import end
from headrace.launch.job import launch_folder
from headrace.launch.record import RECORD, read_launch
from headrace.plan.technique import installed
from headrace.predict.prediction import Prediction, predict
from headrace.report.compare import LIMIT, comparison_sections
from headrace.report.forecast import TITLE, forecast_section, no_forecast
from headrace.report.loss import loss_section
from headrace.report.page import Safe, cards, join, muted, section, tag
from headrace.report.parts import step_time
from headrace.report.run_files import Report, RunFiles, read_run
from headrace.report.single import report_sections
from headrace.report.words import NOT_MEASURED, bits, count, percent, seconds, whole
from headrace.train.run_folder import RunFolder
from headrace.tuner.page import FOR, MOST_LEFT, path_section, trials_section
from headrace.tuner.path import PATH, PLAN
from headrace.tuner.recorded import read_tuning, readings_in
from headrace.ui.frame import (
    LIVE_S,
    SLOW_S,
    address,
    badge,
    command_box,
    framed,
    heading,
    list_parts,
    live,
)
from headrace.ui.judging import TITLE as JUDGED
from headrace.ui.judging import Judge
from headrace.ui.listed import ListedRun, Looker, Remembered
from headrace.ui.runs_folder import METRICS, OutsideFolder, RunsFolder

BUDGETS = {"steps": "steps", "tokens": "tokens", "minutes": "wall_s"}
"""Limit of a goal -> what of the report counts against it."""


MOST_PAGES = 16
"""Most pages of ended runs that the server remembers; a page has up to 0.6 MB."""


class Pages:
    """Make the pages about a folder of runs.

    Args:
        folder: the folder.
        can_stop: whether a token was made, with which runs can be stopped.
    """

    def __init__(self, folder: RunsFolder, *, can_stop: bool = False) -> None:
        self.folder, self.can_stop = folder, can_stop
        self.looker = Looker(folder)
        self._predictions, self._pages = Remembered(), Remembered(MOST_PAGES)
        self._judge = Judge()

    # --- the list ---------------------------------------------------------------------------

    def runs(self) -> str:
        """Return the page that lists the runs."""
        body = (
            heading("Headrace", "Runs"),
            tag(
                "form",
                live("/live/runs", *self.runs_part(), every_s=SLOW_S, name="runs"),
                tag(
                    "p",
                    tag("button", "Compare the marked runs", type="submit"),
                    class_="actions",
                ),
                muted(f"Mark 2 to {LIMIT} runs that have ended to lay them side by side."),
                action="/compare",
                method="get",
            ),
        )
        return framed("Runs", *body, root=self.folder.root)

    def runs_part(self) -> list[Safe]:
        """Return the live part of the list."""
        return list_parts(self.looker.all(), self.folder.root)

    # --- one run ----------------------------------------------------------------------------

    def run(self, name: str) -> str:
        """Return the page of a run, one that has ended or goes on.

        Raises:
            HeadraceError: there is no such run, or it cannot be read.
        """
        path = self.folder.find(name)
        report = self.looker.report(path)
        parts = self._going(path) if report is None else self._ended(path, report)
        return framed(name, *parts, root=self.folder.root)

    def _ended(self, path: Path, report: Report) -> list[Safe]:
        """Return the sections of a run that has ended: those of its report, and the forecast."""
        version = [_version(path / n) for n in ("report.json", "metrics.jsonl", "findings.json")]

        def make() -> list[Safe]:
            return report_sections(
                read_run(path),
                compared=[_forecast_slot(path.name)],
                within=self.folder.root,
                commands=True,
            )

        return self._pages.get(path, version, make)

    def _going(self, path: Path) -> list[Safe]:
        """Return the sections of a run that goes on, or was stopped without a report."""
        url = address("runs", path.name, "live")
        return [
            live(url, *self.run_part(path.name), every_s=LIVE_S, name="run"),
            _doctor_slot(path.name),
            _forecast_slot(path.name, every_s=SLOW_S),
            self._stop(path),
        ]

    def run_part(self, name: str) -> list[Safe]:
        """Return the live part of a run's page: how far it is, its loss, where its time goes.

        Raises:
            HeadraceError: there is no such run, it has ended, or it cannot be read.
        """
        path = self.folder.find(name)
        if self.looker.report(path) is not None:
            raise RunEnded(name, path)
        listed, run = self.looker.one(name), self.looker.growing(path)
        parts = [_header(listed)]
        if run.report.steps is not None:
            figures = section("So far", cards(_figures(run)))
            parts += [figures, loss_section([run], [name]), step_time(run)]
        return parts

    def _stop(self, path: Path) -> Safe:
        """Return the button that stops a run that was launched; the page shows it with a token."""
        launched = (launch_folder(path.parent, path.name) / RECORD).is_file()
        if not (self.can_stop and launched):
            return Safe("")
        button = tag(
            "button",
            f"Stop {path.name}",
            type="button",
            class_="stop",
            data_post=address("runs", path.name, "stop"),
            hidden="",
        )
        return tag("p", button, class_="actions")

    def stop(self, name: str) -> str:
        """End a run that was launched, as `headrace stop` does; return what was asked of whom.

        Raises:
            HeadraceError: there is no such run, it was not launched, or its engine refuses.
        """
        path = self.folder.find(name)
        file = launch_folder(path.parent, name) / RECORD
        if not file.is_file():
            raise ConfigError(
                f"{name} was not started by `headrace launch`: only what started it can stop it",
                "Ctrl-C where it was started",
            )
        if not is_within(self.folder.root, file):
            raise OutsideFolder(f"{file} is a link out of {self.folder.root}", f"ls -l {file}")
        with interpreting(file, f"mv {shell(file)} {shell(f'{file}.damaged')}"):
            return end(read_launch(str(path))[0])

    # --- the forecast -----------------------------------------------------------------------

    def forecast(self, name: str) -> Safe:
        """Return the section with a run's plan, predicted and measured.

        Raises:
            HeadraceError: there is no such run, or its files are damaged.
        """
        path = self.folder.find(name)
        report = self.looker.report(path) or self.looker.growing(path).report
        version = [_version(path / n) for n in (".plan.toml", "plan.toml", "environment.json")]
        try:
            tokens, prediction = self._predictions.get(path, version, lambda: _predicted(path))
        except (HeadraceError, OSError) as error:
            return no_forecast(error.message if isinstance(error, HeadraceError) else str(error))
        return forecast_section(prediction, report, tokens)

    def forecast_page(self, name: str) -> str:
        """Return the forecast as a page of its own, for browsers without scripts."""
        parts = (heading("Headrace run", name), self.forecast(name))
        return framed(f"{name}: {TITLE}", *parts, root=self.folder.root)

    # --- the doctor -------------------------------------------------------------------------

    def verdict(self, name: str) -> Safe:
        """Return the doctor's verdict on a run that has not ended, as far as it has come.

        Raises:
            HeadraceError: there is no such run, or it cannot be read.
        """
        path = self.folder.find(name)
        if self.looker.report(path) is not None:
            link = tag("a", "its report has the verdict", href=address("runs", name))
            return section(JUDGED, tag("p", "The run has ended: ", link, "."))
        version = [_version(path / n) for n in (METRICS, RECORDED, "plan.toml", "environment.json")]
        return self._judge.newest(path, tuple(version))

    def verdict_page(self, name: str) -> str:
        """Return the verdict as a page of its own, for browsers without scripts."""
        parts = (heading("Headrace run", name), self.verdict(name))
        return framed(f"{name}: {JUDGED}", *parts, root=self.folder.root)

    # --- several runs -----------------------------------------------------------------------

    def comparison(self, names: list[str]) -> str:
        """Return the page with several runs side by side.

        Raises:
            HeadraceError: too few or too many were named, or one cannot be read.
        """
        names = list(dict.fromkeys(names))
        if not 2 <= len(names) <= LIMIT:
            message = f"a comparison takes 2 to {LIMIT} runs; {len(names)} were marked"
            raise ConfigError(message, f"headrace report {' '.join(map(shell, names)) or 'RUN'}")
        runs = [read_run(self.folder.find(name)) for name in names]
        sections = comparison_sections(runs, within=self.folder.root)
        command = " ".join(shell(run.directory) for run in runs)
        alone = section("As a page of its own", command_box(f"headrace report {command}"))
        return framed(f"{len(runs)} runs compared", *sections, alone, root=self.folder.root)

    # --- a tuning ---------------------------------------------------------------------------

    def tuning(self, name: str) -> str:
        """Return the page of a tuning: its path, and every trial.

        Raises:
            HeadraceError: there is no such tuning, or it cannot be read.
        """
        path = self.folder.find(name)
        return framed(name, *_tuning_parts(path), root=self.folder.root)


class RunEnded(ConfigError):
    """A run has ended, and its page is no longer a live one."""

    def __init__(self, name: str, path: Path) -> None:
        super().__init__(f"{name} has ended", f"headrace report {shell(path)}")


def _version(file: Path) -> tuple[int, int, int] | None:
    """Return what changes when a file does; None where there is none."""
    try:
        about = file.stat()
    except OSError:
        return None
    return about.st_mtime_ns, about.st_size, about.st_ino


def _predicted(path: Path) -> tuple[int, Prediction]:
    """Return the tokens of a step of a run's plan, and what is predicted of it where it was."""
    plan = read_recorded_plan(path, installed())
    where = place_of(plan, RunFolder(path).read("environment") or {})
    return plan.batch.tokens, predict(plan, *where)


def _forecast_slot(name: str, *, every_s: int = 0) -> Safe:
    """Return the place of a forecast, which the page asks for once it is shown."""
    url = address("runs", name, "forecast")
    link = tag("p", tag("a", "What was predicted of its plan, beside what it measured", href=url))
    return live(url, section(TITLE, link), every_s=every_s, name="forecast", now=True)


def _doctor_slot(name: str) -> Safe:
    """Return the place of the doctor's verdict, which the page asks for once it is shown."""
    url = address("runs", name, "doctor")
    link = tag("p", tag("a", "What the doctor finds in what the run has written", href=url))
    return live(url, section(JUDGED, link), every_s=SLOW_S, name="doctor", now=True)


def _header(listed: ListedRun) -> Safe:
    """Return the head of a run that goes on, or was stopped."""
    remedy = listed.remedy.text
    return join(
        (
            heading(
                "Headrace run",
                listed.name,
                badge(listed.tone, listed.badge),
                tag("p", listed.sentence, class_="verdict"),
            ),
            *((section("Go on", command_box(remedy)),) if remedy else ()),
        )
    )


def _figures(run: RunFiles) -> list[tuple[str, str, str]]:
    """Return the key figures of a run that goes on, as (name, value, note)."""
    report, loss = run.report, run.metrics["loss"]
    last = report.evaluated[-1] if report.evaluated else None
    shares = [
        (value / (limit * (60 if key == "minutes" else 1)), f"of {limit:,g} {key}")
        for key, field in BUDGETS.items()
        if (limit := report.goal.asked.get(key)) and (value := getattr(report, field)) is not None
    ]
    share, of = max(shares, default=(None, "its goal sets no limit"))
    target = report.goal.asked.get("bits_per_byte")
    return [
        ("Training loss", bits(float(loss[-1])) if len(loss) else NOT_MEASURED, "nats per token"),
        (
            "Validation, bits per byte",
            bits(last.bits_per_byte) if last else NOT_MEASURED,
            f"best {bits(report.best_bits_per_byte)}" + (f", goal {target:g}" if target else ""),
        ),
        ("Of its budget", percent(share), of),
        ("Steps", whole(report.steps), f"{count(report.tokens)} tokens"),
        ("Wall time", seconds(report.wall_s), "since it began"),
        ("Steady speed", whole(report.steady_tokens_per_s), "tokens per second, median"),
    ]


def _tuning_parts(path: Path) -> list[Safe]:
    """Return the sections of a tuning."""
    if not (path / PATH).is_file():
        words = f"{count(readings_in(path))} readings so far. Its path is written when it ends."
        return [heading("Headrace tuning", path.name, tag("p", words, class_="verdict"))]
    tuning = read_tuning(path)
    kept = sum(row.verdict == "kept" for row in tuning.path)
    words = f"{kept} changes kept" if kept != 1 else "1 change kept"
    aim = FOR.get(tuning.aim, tuning.aim)
    left = [tag("li", tag("code", change)) for change in tuning.left[:MOST_LEFT]]
    took = () if tuning.seconds is None else (muted(f"It took {seconds(tuning.seconds)}."),)
    return [
        heading(
            f"Headrace tuning for {aim}",
            tuning.name,
            badge("good" if kept else "plain", words),
            tag("p", tuning.result, class_="verdict"),
            *((muted("Interrupted: this is as far as it came."),) if tuning.interrupted else ()),
            *took,
        ),
        path_section(tuning.path, tuning.bought, memory=tuning.aim == "memory"),
        trials_section(tuning.path, counted=tuning.counted),
        *((section("Not tried", tag("ul", *left, class_="legend")),) if left else ()),
        section("Run it", command_box(f"headrace train {shell(path / PLAN)}")),
    ]

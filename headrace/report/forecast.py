"""Render what was predicted of a plan beside what its run measured."""

from collections.abc import Callable
from dataclasses import dataclass

from headrace.predict.intervals import Between
from headrace.predict.page import SOURCES
from headrace.predict.prediction import Prediction
from headrace.report.page import Safe, bar, join, muted, section, swatch, table
from headrace.report.run_files import Report
from headrace.report.words import NOT_MEASURED, seconds, size, whole

TITLE = "Plan against measured"


@dataclass(frozen=True)
class ForecastRow:
    """Hold one quantity, predicted and measured.

    Args:
        name: of the quantity.
        predicted: what was predicted of it; None where nothing was.
        between: the 80% interval of that; None where there is none.
        measured: what the run measured; None where it did not.
        form: renders such a number.
    """

    name: str
    predicted: float | None
    between: Between | None
    measured: float | None
    form: Callable[[float | None], str]

    def cells(self) -> tuple[str, ...]:
        """Return the cells of its row: name, bars, predicted, measured, and their ratio."""
        widest = max(self.predicted or 0.0, self.measured or 0.0) or 1.0
        pairs = ((self.predicted, "c0"), (self.measured, "c2"))
        bars = join(bar(value / widest, colour) for value, colour in pairs if value is not None)
        predicted: str = "not predicted"
        if self.predicted is not None:
            ends = self.between
            range_ = f"{self.form(ends.low)} to {self.form(ends.high)}" if ends else ""
            predicted = join((self.form(self.predicted), muted(range_)))
        ratio = ""
        if self.predicted and self.measured is not None:
            ratio = f"{self.measured / self.predicted:.2f}x"
        return self.name, bars, predicted, self.form(self.measured), ratio


def forecast_section(prediction: Prediction, report: Report, tokens_per_step: int) -> Safe:
    """Render a prediction of a run's plan beside what the run measured.

    Args:
        prediction: of the plan, by the rates of the device that the run was on.
        report: what the run measured, so far or at its end.
        tokens_per_step: tokens of a step, by the plan.
    """
    time, memory, rate = prediction.time, prediction.memory, report.steady_tokens_per_s
    step_s = tokens_per_step / rate if rate else None
    rows = [
        ForecastRow("A step", time.step_s, time.step_between, step_s, seconds),
        ForecastRow("Tokens per second", time.tokens_per_s, time.rate_between, rate, whole),
        ForecastRow(
            "Peak memory", memory.peak_bytes, None, report.peak_memory_bytes.allocated, size
        ),
    ]
    head = (
        "Quantity",
        "",
        join((swatch("c0"), "Predicted")),
        join((swatch("c2"), "Measured")),
        "Ratio",
    )
    notes = [f"Predicted for {prediction.rates.device}: {SOURCES[prediction.rates.source]}."]
    if time.step_between is not None:
        notes.append("The range holds 80% of what such predictions came to.")
    if time.no_interval:
        notes.append(f"The time has no range: {time.no_interval}.")
    if time.unknown:
        notes.append(f"No time is predicted: {time.unknown}.")
    if report.peak_memory_bytes.allocated is None:
        notes.append(f"The peak of a run is {NOT_MEASURED} before its end.")
    notes.append("A ratio is measured over predicted.")
    return section(
        TITLE, table(TITLE, head, [r.cells() for r in rows], text=2), muted(" ".join(notes))
    )


def no_forecast(why: str) -> Safe:
    """Render why nothing is predicted of a run's plan."""
    return section(TITLE, muted(f"Nothing is predicted: {why}"))

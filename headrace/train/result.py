"""Hold what `train.run` returns: the run's folder, and what is made of a run after it has ended.

Training needs neither the doctor nor a sample nor a page, and their packages may import this one,
but not the reverse. So they are imported by name, as `installed` imports techniques, when they are
first needed: by a shell as soon as the run has ended, by a notebook when it reads
`result.findings`.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from typing import Any

from headrace.core.inline import inline_page, inline_table
from headrace.plan.technique import Catalogue, installed
from headrace.train.interrupts import Closing


@dataclass(frozen=True)
class Verdict:
    """State what binds the steps of a run, and which remedy to try first.

    Args:
        bottleneck: its name; None where no step was measured.
        share: its share of the time.
        sentence: the verdict in a sentence.
        evidence: the measurements that it rests on.
        healthy: whether no remedy is forecast to gain much; None where no gain is forecast.
        remedy: the command that applies the remedy; None where there is none.
        gain: the forecast gain of the remedy, in words.
        unknown: what is unavailable about the run, and what would show it; "" where nothing is.
    """

    bottleneck: str | None
    share: float | None
    sentence: str
    evidence: str
    healthy: bool | None
    remedy: str | None
    gain: str | None
    unknown: str


@dataclass(frozen=True)
class Conclusion:
    """Hold the findings, the sample and the page that are made of a run after it has ended.

    Args:
        report: the object of report.json.
        findings: what findings.json holds, the gravest first.
        page: the file report.html; None where it was not made.
        not_made: what could not be made, and why.
    """

    report: dict[str, Any]
    findings: list[dict[str, Any]]
    page: Path | None
    not_made: dict[str, str]

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict of the doctor; None where it could not be made."""
        narrowest = self.report["narrowest"]
        if not narrowest:
            return None
        others = {key: value for key, value in narrowest.items() if key != "station"}
        return Verdict(bottleneck=narrowest["station"], **others)

    @property
    def sample(self) -> str | None:
        """Return a text that the model wrote; None where there is no checkpoint."""
        sample = self.report["sample"]
        return sample and sample["text"]


@dataclass
class Result:
    """Hold what a run left behind. Findings, sample and page are made when they are first read.

    Args:
        folder: the folder of the run.
        catalogue: the techniques that its remedies may use; None for all that are installed.
        first: whether this process is the first rank, which alone concludes a run.
    """

    folder: Path
    catalogue: Catalogue | None = None
    first: bool = True
    _conclusion: Conclusion | None = field(default=None, repr=False)

    def conclude(
        self, closing: Closing | None = None, say: Callable[[str], None] | None = None
    ) -> Conclusion:
        """Return the findings, a sample and the page, which are also written into the folder.

        Args:
            closing: catches the signals; a signal skips what is not made yet.
            say: is called with a line about each thing that cannot be made.
        """
        if self._conclusion is not None:
            return self._conclusion
        room = import_module("headrace.report.conclude")
        conclusion: Conclusion = room.conclude(
            self.folder, self.catalogue or installed(), closing or Closing(), say or _ignore
        )
        self._conclusion = conclusion
        return conclusion

    @property
    def report(self) -> dict[str, Any]:
        """Return the object of report.json."""
        return self.conclude().report

    @property
    def findings(self) -> list[dict[str, Any]]:
        """Return the findings of the doctor with their remedies, the gravest first."""
        return self.conclude().findings

    @property
    def verdict(self) -> Verdict | None:
        """Return the verdict of the doctor."""
        return self.conclude().verdict

    @property
    def sample(self) -> str | None:
        """Return a text that the model wrote."""
        return self.conclude().sample

    @property
    def page(self) -> Path | None:
        """Return the file of the page about the run."""
        return self.conclude().page

    def _repr_html_(self) -> str:
        if not self.first:
            return ""
        if (page := self.page) is None:
            why = self.conclude().not_made.items()
            return inline_table(f"{self.folder}: no page was made", (), why)
        return inline_page(page.read_text())


def _ignore(line: str) -> None:
    """Ignore a line about what could not be made: `Conclusion.not_made` holds it."""

"""The end of a run: the doctor's findings, a sample and the page are made from its folder.

The run is complete without them. What cannot be made is reported in one line and under `not_made`.
"""

from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from headrace.doctor.advice import advise
from headrace.doctor.words.answer import closing_verdict, findings_json
from headrace.inference.load import open_model, read_recorded_plan
from headrace.inference.sample import generate_text
from headrace.plan.technique import Catalogue
from headrace.train.interrupts import Closing
from headrace.train.result import Conclusion
from headrace.train.run_folder import RunFolder

SAMPLE_TOKENS = 80
"""Most tokens of the sample that a run ends with."""


def conclude(
    folder: Path, catalogue: Catalogue, closing: Closing, say: Callable[[str], None]
) -> Conclusion:
    """Write findings, a sample and the page into the folder of a run, and return them.

    Args:
        folder: the folder of a run that has ended.
        catalogue: the techniques that remedies may use.
        closing: hears the signals that leave out what is not made yet.
        say: is called with a line about each thing that cannot be made.
    """
    run = RunFolder(folder)
    report = run.read_report()
    not_made: dict[str, str] = {}
    findings: list[dict[str, Any]] = []
    report |= {"narrowest": None, "sample": None, "not_made": not_made}
    make = partial(_make, not_made=not_made, say=say)

    def add_findings() -> None:
        advice = advise(folder, catalogue)
        report["narrowest"] = closing_verdict(advice)
        findings.extend(findings_json(advice))
        run.write("findings", findings)

    def add_page() -> None:
        from headrace.report.single import write_report

        write_report(folder)

    make("findings", add_findings, closing)
    if (folder / "checkpoints" / "latest").exists() and report["status"] != "failed":
        make("sample", lambda: report.update(sample=sample_of(folder, catalogue)), closing)
    make("report with findings and sample", partial(run.write, "report", report), Closing())
    make("page", add_page, closing)
    if "page" in not_made:
        with suppress(OSError):  # `make` reported it
            run.write("report", report)
    if left_out := [what for what, why in not_made.items() if why == closing.name]:
        say(f"{closing.name} came after the run's end, and leaves out its {', '.join(left_out)}")
    page = None if "page" in not_made else folder / "report.html"
    return Conclusion(report, findings, page, not_made)


def _make(
    what: str,
    make: Callable[[], object],
    closing: Closing,
    *,
    not_made: dict[str, str],
    say: Callable[[str], None],
) -> None:
    """Call `make`; where it fails, keep the reason in `not_made`, report it, and go on."""
    try:
        if not closing.make(make):
            not_made[what] = str(closing.name)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # what Rust raises is no Exception
        lines = str(error).strip().splitlines() or [type(error).__name__]
        not_made[what] = lines[0]
        say(f"no {what}: {lines[0]}; the run is complete without")


def sample_of(folder: Path, catalogue: Catalogue) -> dict[str, str] | None:
    """Return a prompt and the text that the newest checkpoint of a run continues it with.

    A network that tells images apart writes none.
    """
    if read_recorded_plan(folder, catalogue).vision is not None:
        return None
    build = open_model(folder, catalogue)
    new_tokens = SAMPLE_TOKENS
    if build.config.position == "learned":  # it has no position beyond its context
        new_tokens = min(new_tokens, build.config.context - 1)
    text = generate_text(build, "", new_tokens=new_tokens, temperature=0.8, top_k=50, seed=0)
    return {"prompt": "", "text": text}

"""Render what the doctor found in words: the last step, which nothing decides by.

`describe` makes a sentence, the evidence and what was not measured from the kind and the facts of a
finding. `answer.py` renders a whole answer, for a terminal and as JSON.
"""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.doctor.findings import Finding, Kind
from headrace.doctor.words.described import Describe
from headrace.doctor.words.of_plans import OF_PLANS
from headrace.doctor.words.of_ranks import OF_RANKS
from headrace.doctor.words.of_runs import OF_RUNS
from headrace.doctor.words.of_traces import OF_TRACES

DESCRIBE: Mapping[Kind, Describe] = {**OF_RUNS, **OF_RANKS, **OF_TRACES, **OF_PLANS}
"""Kind of a finding -> what renders its facts."""


@dataclass(frozen=True)
class Described:
    """Hold a finding in words.

    Args:
        sentence: the verdict.
        evidence: the numbers that it rests on.
        not_measured: what would sharpen it, "" where nothing would.
    """

    sentence: str
    evidence: str
    not_measured: str


def describe(finding: Finding) -> Described:
    """Return a finding in words."""
    sentence, evidence, not_measured = DESCRIBE[finding.kind](finding, finding.facts)
    parts = [evidence]
    if finding.kind is not Kind.GRAPH_BREAKS and (count := finding.facts.get("graph_breaks")):
        parts.append(f"{count} graph breaks")
    parts += [describe(other).evidence for other in finding.beside]
    if (split := finding.facts.get("in_trace")) is not None:
        in_trace = describe(split)
        parts.append(f"in a trace {in_trace.evidence}")
        not_measured = in_trace.not_measured
    if why := finding.facts.get("no_clock"):
        not_measured = f"{not_measured}; the GPU's clock: {why}".removeprefix("; ")
    return Described(sentence, "; ".join(parts), not_measured)

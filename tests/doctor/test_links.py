"""What ranks send and nothing hides is lessened by what sends less, as far as the planner says."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from rank_sizes import SIZES

from headrace.assemble.build import make_context
from headrace.assemble.context import elsewhere
from headrace.cli.catalogue import catalogue
from headrace.costs.machine import Machine
from headrace.doctor.across_ranks import straggler
from headrace.doctor.findings import Finding, Kind
from headrace.doctor.forecast import MeasuredRun
from headrace.doctor.observation import Observation, _ranks
from headrace.doctor.remedies import PlanRemedy, remedies
from headrace.doctor.words import describe
from headrace.plan.plan import Plan

TEXT = f"""{SIZES}micro_sequences = 4
[mesh]
data = 4
"""
DEVICE = "NVIDIA H200"


def asked(text: str, device: str = DEVICE) -> dict[str, PlanRemedy]:
    """Return the remedies of four ranks that send for 30% of a step, by their words."""
    plan = Plan.read(TEXT + text, catalogue())
    context: Any = make_context(plan, torch.device("cpu"))
    if device != "cpu":
        context = elsewhere(context, device)
    finding = Finding(Kind.EXPOSED_COMMUNICATION, 0.3)
    measured = MeasuredRun(1.0, waits_s=0.3)
    where = context, Machine.assumed(context.device_name), catalogue()
    return {" ".join(one.change): one for one in remedies(finding, plan, *where, measured)}


def test_sums_that_hide_are_a_remedy_of_plain_replicas() -> None:
    known = asked("")
    hidden = known["+data_parallel"]
    assert hidden.gain is not None and 0 < hidden.gain.value < 0.3 / 0.7
    assert hidden.forecast_from == "share"


def test_knobs_of_slices_are_remedies_where_they_send_less() -> None:
    known = asked("[techniques.fsdp]\nreshard = true\n")
    assert {"techniques.fsdp.reshard=false", "mesh.replicate=2"} & {*known}
    assert any(words.startswith(("+zero", "-fsdp +zero")) for words in known)
    half = known["techniques.fsdp.gather=bf16"]
    assert half.equality == "approximate", "it rounds what is sent"
    timed = {words: one.gain for words, one in known.items() if "float8" not in words}
    assert all(gain is not None and gain.value > 0 for gain in timed.values())
    (untimed,) = {*known} - {*timed}
    assert known[untimed].gain is None, "no time is predicted of it"


def test_without_predicted_times_knobs_are_not_proposed() -> None:
    known = asked("[techniques.fsdp]\n", "cpu")
    assert not any(words.startswith(("techniques.", "mesh.")) for words in known)


@pytest.mark.parametrize(("hosts", "host"), [(["a", "a"], ""), (["a", "b"], "b"), (None, "")])
def test_a_straggler_is_named_with_its_host(hosts: list[str] | None, host: str) -> None:
    signal = {"late_s": 0.5, "last": 1, "last_share": 1.0, "waited_s": [0.5, 0.0], "hosts": hosts}
    seen = Observation(step_s=(1.0,) * 9, **_ranks({"ranks": signal}))
    finding = straggler(seen)
    assert finding is not None and finding.facts["host"] == host
    words = describe(finding)
    assert ("on b: the others alone, with --resume" in words.evidence) == (host == "b")
    assert f"PERFORMANCE {'on b' if host else 'where rank 1 is'}" in words.not_measured
    changing = straggler(replace(seen, last_share=0.4))
    assert changing is not None and "nvidia-smi" not in describe(changing).not_measured

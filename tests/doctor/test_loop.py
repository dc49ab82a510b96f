"""Remedies of a loop that is not Headrace's are in its words, and name what was not seen."""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

import headrace
from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.doctor.findings import KIND_OF, PHASES, Finding, Kind, phase_findings
from headrace.doctor.forecast import Forecast, by_share
from headrace.doctor.loop import Change, Loop
from headrace.doctor.loop_changes import OF_BOTTLENECKS, OF_PHASES
from headrace.doctor.loop_remedies import examine_loop, loop_remedies, techniques_of
from headrace.doctor.observation import masks_prompts
from headrace.doctor.use import NO_PLAN
from headrace.doctor.words import describe
from headrace.doctor.words.answer import SHARE_ENDS
from headrace.plan.changes import flat
from headrace.plan.plan import Plan
from headrace.plan.symptoms import BOTTLENECKS as KNOWN
from headrace.recipes import recipes

LOADER = {"name": "DataLoader", "num_workers": 0, "pin_memory": False}
GPU = {"device": "cuda", "dtype": "float32", "cores": 8, "compiler": {"graphs": 0}}
BUSY = {
    "compiler": {"graphs": 9, "graphs_after_warmup": 4, "graph_breaks": 2},
    "loader": {**LOADER, "num_workers": 2, "persistent_workers": False},
    "rows": [{"lr": 0.1}, {}],
    "signals": {"untrained_share": 0.4},
}
LOOPS = (
    {},
    {**GPU, "loader": LOADER},
    {**GPU, **BUSY},
    {"device": "cpu", "padding_fraction": 0.0},
    {**GPU, **BUSY, "trainer": {"bf16": False}},
    {**GPU, "loader": LOADER, "trainer": {"x": 1}},
)


def rows() -> Iterator[Change]:
    """Yield the changes of every table, for every loop."""
    for table in (OF_BOTTLENECKS, OF_PHASES):
        for row in table.values():
            for report in LOOPS:
                yield from row(Loop(report))


def asked(name: str, report: dict[str, Any], share: float = 0.6) -> list[Any]:
    kind = KIND_OF.get(name, Kind.PHASE)
    return loop_remedies(Finding(kind, share, {"bottleneck": name}), Loop(report), catalogue())


def words(name: str, report: dict[str, Any]) -> str:
    return "\n".join(remedy.change[0] for remedy in asked(name, report))


def test_tables_speak_of_what_there_is() -> None:
    """They have the doctor's words, techniques and keys, and fields of TrainingArguments."""
    assert {*OF_BOTTLENECKS} <= {*KNOWN} and {*OF_PHASES} <= {*PHASES}
    known, names = catalogue(), set[str]()
    keys = flat(Plan.read(recipes()["demo"].read_text(), known))
    for row in rows():
        found = techniques_of(row, known)
        assert bool(found) == bool(row.symptom or row.same), row
        assert {*row.keys} <= {*keys}, row
        names |= set(re.findall(r"(\w+)(?:=| up\b| down\b| halved| doubled)", row.trainer))
    transformers = pytest.importorskip("transformers")
    fields = {*transformers.TrainingArguments.__dataclass_fields__}
    others = {"batched", "train_dataset", "data_collator", "attn_implementation", "fullgraph"}
    assert names - others and names - others <= fields


@pytest.mark.parametrize(("padded", "counted"), [(None, ""), (0.1, ""), (0.3, "10.0%")])
def test_padding_that_the_loss_counts_is_told(padded: float | None, counted: str) -> None:
    report = {
        "phase_s": {},
        "peak_memory_bytes": {},
        "memory_lines": [],
        "tokens": 50,
        "wasted_token_fraction": 0.2,
        "padding_fraction": padded,
    }
    (found,) = phase_findings(report)
    assert found.share == 0.2 and found.facts == {"tokens": 50, "padding_share": padded or 0.0}
    assert describe(found).evidence.endswith(counted or "of 50 tokens")


def test_a_share_forecasts_and_nothing_else_is_guessed() -> None:
    report = {**GPU, "loader": LOADER}
    first, copies, once = asked("input", report)
    assert asked("input", {**GPU, **BUSY})[1].gain is None  # more ahead reads no faster
    assert first.change == ("DataLoader(num_workers=2) instead of 0",)
    assert first.headrace == ("loader_workers", "data.workers")
    assert first.gain == by_share(0.6, Forecast(None, "none")).gain
    assert copies.gain is None and "copies" in copies.unknown and NO_PLAN in once.unknown
    for name in {*OF_BOTTLENECKS} - {"input", "wasted tokens"}:
        found = asked(name, report)
        assert found and all(r.gain is None and r.unknown == NO_PLAN for r in found), name
    assert NO_PLAN in asked("launch", {})[0].unknown != NO_PLAN
    assert not asked("recipe", report) and not asked("optimizer", report, 0.01)


@pytest.mark.parametrize(
    ("share", "workers", "cores", "left"),
    [
        (0.93, 0, 16, 0.465),  # two read beside the step, each as slowly as one did in it
        (0.6, 0, 1, 0.6),  # one does, and the step's own 0.4 are hidden behind it
        (0.3, 0, 16, 0.7),  # reading is hidden behind the step
        (0.9, 6, 8, 0.75),  # six took all of the step; two more are a third more
    ],
)
def test_reading_is_as_many_times_as_fast_as_there_are_more_that_read(
    share: float, workers: int, cores: int, left: float
) -> None:
    report = {**GPU, "cores": cores, "loader": {**LOADER, "num_workers": workers}}
    first = asked("input", report, share)[0]
    assert first.gain is not None and first.gain.high == pytest.approx(1 / left - 1)
    assert 0 < first.gain.low < first.gain.value < first.gain.high


def test_what_is_asked_for_already_is_not_advised_again() -> None:
    pinned = {**LOADER, "num_workers": 8, "pin_memory": True, "persistent_workers": True}
    told = words("input", {**GPU, "loader": pinned})
    assert not re.search("num_workers|pin_memory|persistent", told) and "prefetch_factor=4" in told
    assert "num_workers=8) instead of 6" in words(
        "input", {**GPU, "loader": {**LOADER, "num_workers": 6}}
    )
    assert "autocast" in words("computation", GPU)
    for had in ({"autocast": "bfloat16"}, {"dtype": "bfloat16"}, {"trainer": {"bf16": True}}):
        assert "autocast" not in words("computation", {**GPU, **had})
    assert "torch.compile(model)" not in words("launch", {**GPU, "compiled": True})
    fused = {"optimizer": {"name": "AdamW", "fused": True}}
    assert asked("optimizer", GPU) and not asked("optimizer", {**GPU, **fused})
    assert "lr=0.05 instead of 0.1" in words("instability", {**GPU, **BUSY})
    assert "clip" not in words("instability", {**GPU, "clip_rate": 0.2})
    limited = Finding(Kind.CLOCK_LIMITED, 0.3, {"why": "thermal slowdown"})
    (cooler,) = loop_remedies(limited, Loop(GPU), catalogue())
    assert "nvidia-smi" in cooler.change[0]


def test_only_padding_is_packed_away() -> None:
    packed, _ = asked("wasted tokens", {**GPU, "padding_fraction": 0.2})
    assert packed.gain == by_share(0.2, Forecast(None, "none")).gain
    assert packed.headrace == ("best_fit_packing", "document_packing")
    (masked,) = asked("wasted tokens", {**GPU, "padding_fraction": 0.0})
    assert masked.gain is None and "prompts" in masked.unknown
    assert asked("wasted tokens", {**GPU, "padding_fraction": None})[0].gain is None


class Slow(torch.utils.data.Dataset[Any]):
    """Make rows, a third of them padding, and take a while for each."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        time.sleep(0.002)
        ids = torch.arange(6)
        mask = (ids < 4).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.where(mask > 0, -100)}


def watched(file: Path) -> dict[str, Any]:
    """Return what a watch saves of a slow loop."""
    torch.manual_seed(0)
    model = torch.nn.Embedding(6, 6)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    loader = torch.utils.data.DataLoader(Slow(), batch_size=2)
    with headrace.watch(model, optimizer, loader) as seen, torch.autocast("cpu"):
        for batch in seen.loader:
            logits = model(batch["input_ids"]).flatten(0, 1)
            torch.nn.functional.cross_entropy(logits, batch["labels"].flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    seen.save(file)
    return json.loads(file.read_text())


def test_a_watched_loop_is_told_what_to_do_and_what_was_not_seen(tmp_path: Path) -> None:
    file = tmp_path / "watched.json"
    report = watched(file)
    assert (report["autocast"], report["compiled"], report["trainer"]) == ("bfloat16", False, None)
    told = CliRunner().invoke(app, ["doctor", str(file), "--json"])
    found = json.loads(told.stdout)
    names = [row["bottleneck"] for row in found]
    assert names[0] == "input" and len({*names}) == len(names)
    assert "wait p50" in found[0]["evidence"]  # the phase's
    first = found[0]["remedies"][0]
    more = f"DataLoader(num_workers={min(2, report['cores'])}) instead of 0"
    assert first["change"] == [more]
    assert first["gain"]["low"] < first["gain"]["high"] and first["headrace"]
    (wasted,) = (row for row in found if row["bottleneck"] == "wasted tokens")
    assert wasted["share"] == pytest.approx(1 / 3) and wasted["remedies"]
    assert found[-1]["bottleneck"] == "not measured"
    assert found[-1]["not_measured"] == "; ".join(report["not_measured"])
    text = CliRunner().invoke(app, ["doctor", str(file)]).stdout
    for row in found:
        assert row["sentence"] in text and row["not_measured"] in text
    ends = r"\+[\d.]+% to \+[\d.]+%"  # small ones have a digit behind the point
    assert re.search(rf"{re.escape(more)}: {ends} \({SHARE_ENDS}\)", text)
    assert "80%: " not in text and "in Headrace loader_workers" in text  # no interval is claimed
    assert "no step was traced" in text
    why = [one["unknown"] for row in found for one in row["remedies"] if not one["gain"]]
    assert any(NO_PLAN in one and f"gain not forecast ({one})" in text for one in why)


def test_of_too_few_steps_that_is_said_first_and_nothing_is_forecast(tmp_path: Path) -> None:
    report = watched(file := tmp_path / "watched.json")
    report["rows"] = report["rows"][:5]  # of which three are steady
    file.write_text(json.dumps(report))
    told = CliRunner().invoke(app, ["doctor", str(file), "--json"])
    found = json.loads(told.stdout)
    few = describe(Finding(Kind.TOO_FEW_STEPS, 0.0, {"steps": 3, "fewest": 8}))
    assert found[0]["sentence"] == few.sentence
    assert found[0]["evidence"] == few.evidence and len(found) > 2
    assert all(not row["remedies"] for row in found)
    text = CliRunner().invoke(app, ["doctor", str(file)]).stdout
    assert text.startswith(f"not measured: {few.sentence}") and "%)" not in text
    assert text.rstrip().splitlines()[-1] == found[0]["unknown"]


@pytest.mark.parametrize(("padded", "masked"), [(None, True), (0.0, True), (0.3, False)])
def test_masked_prompts_are_no_fault(tmp_path: Path, padded: float | None, masked: bool) -> None:
    """Two thirds of the tokens have no target, and nothing or a mask says what they are."""
    file = tmp_path / "watched.json"
    report = {**watched(file), "wasted_token_fraction": 2 / 3, "padding_fraction": padded}
    report["rows"] = [{**row, "wait_s": 0.0, "input_s": 0.0} for row in report["rows"]]
    file.write_text(json.dumps(report))
    found, _ = examine_loop([file])
    names = [one.bottleneck for one in found]
    place = names.index("wasted tokens")
    assert (place == 0) is (not masked) and names.count("wasted tokens") == 1
    if masked:
        assert place > names.index("forward and backward")
        assert found[place].facts["masks_prompts"] and found[place].facts["padded_share"] == padded
        told = CliRunner().invoke(app, ["doctor", str(file)]).stdout
        assert describe(found[place]).evidence in told and "masked prompts" in told
    assert masks_prompts(report) is masked and not masks_prompts({**report, "watched": False})


def test_a_trace_without_a_device_lists_operations(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        for _ in range(3):
            (weight @ weight).sum()
            profiler.step()
    profiler.export_chrome_trace(str(tmp_path / "trace.json"))
    (unjudged, listed), loop = examine_loop([tmp_path / "trace.json"])
    assert unjudged.kind is Kind.TRACE_WITHOUT_DEVICE and not loop.report
    assert listed.share == 0 and "products" in listed.facts["families"]
    told = CliRunner().invoke(app, ["doctor", str(tmp_path / "trace.json")])
    assert told.exit_code == 0 and describe(listed).evidence in told.stdout
    assert "no change is known" not in told.stdout

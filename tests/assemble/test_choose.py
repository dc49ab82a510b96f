"""The backend is chosen by its time at the run's own shapes, written down, and repeated."""

import json
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest
import tiny
import torch
from facts import tells
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.assemble import autotune as choose
from headrace.assemble import filled
from headrace.assemble.autotune import cache_file, candidates
from headrace.assemble.build import make_build
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.catalogue.explain import explain_plan
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.progress import Progress
from headrace.data.ingest import prepare
from headrace.model import decoder
from headrace.model.attention import Sdpa
from headrace.model.mask import MaskSpec, Rows
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import (
    Card,
    Catalogue,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.report.single import write_report
from headrace.train import train as trainer

MEASURED = "attention=measured"
CPU = torch.device("cpu")
FLASH = "scaled_dot_product_flash_attention_for_cpu"


class Slow(Sdpa):
    """Compute attention as the baseline does, 2 ms later."""

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        time.sleep(0.002)
        return super().__call__(q_BTHK, k_BTGK, v_BTGK, mask)


class Quick(Sdpa):
    """Compute attention as the baseline does, under another class."""


class Sloped(Quick):
    """Compute slopes too, as the baseline does."""

    knows = frozenset({"alibi"})


class Short(Sdpa):
    """Has no kernel here."""

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> None:
        raise UnsupportedError(f"no kernel for rows of {length}", "longer ones")


class Toy(Technique[Build]):
    """Replace attention by the backend `attend`."""

    attend: ClassVar[type[Sdpa]]
    answer: ClassVar[Supported | Unsupported] = Supported()
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    card: ClassVar[Card] = Card("", "", "", "", "")

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def supports(self, context: Context) -> Supported | Unsupported:
        return self.answer

    def predict(self, ledger: Any) -> Any:
        return ledger

    def apply(self, build: Build) -> None:
        build.parts.attend = self.attend()

    def active(self, build: Build) -> Evidence:
        return Evidence(type(build.model.attend) is self.attend, "looked")


class Fast(Toy):
    """Use a backend that is faster than a baseline slowed by 2 ms."""

    attend = Quick


class Inclined(Toy):
    """Use a backend that is as fast and computes slopes."""

    attend = Sloped


class Late(Toy):
    """Use a backend that is 2 ms slower than the baseline."""

    attend = Slow


class Lacking(Toy):
    """Fails once it is tried."""

    attend = Short


class Absent(Toy):
    """Refuses before it is tried."""

    attend, answer = Short, Unsupported("is not installed", "pip install it")


class Other(Toy):
    """Computes something else, so it is never a candidate."""

    attend, equality = Quick, "learning"


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Give each test a home folder of its own."""
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    yield tmp_path


@pytest.fixture
def slow_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decoder, "Sdpa", Slow)


def of(*kinds: type[Toy]) -> Catalogue:
    """Return the real catalogue with these attention backends added."""
    return Catalogue(
        {**catalogue().techniques, **{k.name(): k for k in kinds}}, catalogue().families
    )


class Told(Progress):
    """Keeps what is told."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)


def test_the_fastest_is_written_into_the_plan_and_repeated(
    tiny_plan: Callable[..., Plan], slow_baseline: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, known, told = (
        tiny_plan(MEASURED, "goal.steps=4"),
        of(Fast, Lacking, Absent, Other),
        Told(),
    )
    folder = trainer.run(plan, progress=told, catalogue=known).folder
    resolved = Plan.read((folder / "plan.toml").read_text(), known)
    assert resolved.attention == "plan" and list(resolved.techniques) == ["fast"]
    report = tiny.report(folder)
    found = report["attention"]
    assert report["techniques"]["fast"]["active"] and report["guard"]["compared"]
    assert found["chosen"] == "fast" and not found["cached"]
    assert found["milliseconds"].keys() == {"trunk", "fast"}
    fast, baseline = (found["milliseconds"][name] for name in ("fast", "trunk"))
    assert fast["low"] <= fast["median"] <= fast["high"] and baseline["median"] > 2
    assert tells(found["refused"]["lacking"], "no kernel", 16)
    assert found["refused"]["absent"] == "is not installed" and "flex_attention" in found["refused"]
    assert "detail" not in found  # a technique computes it, and has evidence of its own
    assert "other" not in found["refused"] and any("flash" in name for name in found["kernels"])
    assert found["at"]["rows"] == 8 and found["at"]["tokens_of_a_row"] == 16
    (line,) = (note for note in told.notes if note.startswith("attention by fast"))
    assert "measured: fast" in line and "trunk" in line and "lacking" in line

    def never(*given: Any) -> float:
        raise AssertionError("timed again")

    monkeypatch.setattr(choose, "_seconds", never)
    again = trainer.run(plan, progress=told, catalogue=known).folder
    assert tiny.report(again)["attention"] == {**found, "cached": True}
    longer = resolved.replaced(goal={"steps": 6})  # its own plan: nothing is asked again
    resumed = trainer.run(longer, progress=told, resume=True, folder=folder).folder
    assert resumed == folder and tiny.report(folder)["attention"] == found


def test_the_baseline_stays_where_it_is_fastest(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(MEASURED, "goal.steps=1", "checkpoint.every_steps=0")
    folder = trainer.run(plan, catalogue=of(Late)).folder
    found = tiny.report(folder)["attention"]
    assert found["chosen"] == "trunk" and found["milliseconds"].keys() == {"trunk", "late"}
    assert found["kernels"] == [FLASH] and FLASH in found["detail"]
    resolved = Plan.read((folder / "plan.toml").read_text(), catalogue())
    assert not resolved.techniques and resolved.attention == "plan"


@pytest.mark.parametrize("allowed", [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH])
def test_torchs_own_choice_is_named_where_a_plan_chooses(
    tiny_plan: Callable[..., Plan], allowed: SDPBackend
) -> None:
    """Check that the report names the kernel that ran, and another one where another ran."""
    plan, told = tiny_plan("goal.steps=2"), Told()
    with sdpa_kernel(allowed):
        folder = trainer.run(plan, progress=told).folder
    found = tiny.report(folder)["attention"]
    flash = allowed == SDPBackend.FLASH_ATTENTION
    assert (found["kernels"] == [FLASH]) == flash and ("bmm" in found["kernels"]) != flash
    assert found["chosen"] == "trunk" and all(name in found["detail"] for name in found["kernels"])
    assert [n for n in told.notes if "attention" in n] == [f"attention: {found['detail']}"]
    page = write_report(folder).read_text()
    assert page.count(f"Attention: {found['detail']}.") == 1
    longer = plan.replaced(goal={"steps": 3}, techniques={"fast": Fast()})
    assert trainer.run(longer, resume=True, folder=folder).folder == folder
    report = tiny.report(folder)  # from here a technique computes it
    assert report["attention"] is None and report["techniques"]["fast"]["active"]
    assert "Attention:" not in write_report(folder).read_text()


def test_plain_products_are_named_and_so_is_what_cannot_be_seen(
    tiny_plan: Callable[..., Plan],
) -> None:
    capped = tiny_plan("goal.steps=1", "techniques.logit_soft_cap={}", "checkpoint.every_steps=0")
    build = make_build(capped, prepare(capped), World(), CPU)
    filled.note_own_attention(build)
    assert build.run_notes.own_attention["kernels"] == ["bmm", "softmax"]

    def fails(*given: Any) -> None:
        raise RuntimeError("no such thing\nat all")

    told: list[str] = []
    build.model.attend.prepare, build.note_line = fails, told.append  # type: ignore[method-assign]
    filled.note_own_attention(build)
    detail = "what torch ran was not seen (no such thing)"
    assert build.run_notes.own_attention == {"kernels": [], "detail": detail}
    assert told == [f"attention: {detail}"]


@pytest.mark.parametrize(
    "content", ["", "[]", '{"format": 1, "found": []}', "{" * 9, '{"format": 0}']
)
def test_a_damaged_cache_is_measured_anew(home: Path, content: str) -> None:
    cache_file().parent.mkdir(parents=True)
    cache_file().write_text(content)
    assert choose._read() == {}
    choose._write({"key": {"chosen": "trunk"}})
    assert choose._read() == {"key": {"chosen": "trunk"}}
    assert json.loads(cache_file().read_text())["format"] == choose.FORMAT
    assert [p.name for p in cache_file().parent.iterdir()] == ["attention.json"]


WHOLE = {
    "chosen": "trunk",
    "kernels": ["a"],
    "refused": {"b": "c"},
    "milliseconds": {"trunk": {"median": 1.5, "low": 1, "high": 2.0}},
}


@pytest.mark.parametrize(
    "wrong",
    [
        {"chosen": []},
        {"chosen": "gone"},
        {"kernels": [1]},
        {"refused": []},
        {"milliseconds": 3},
        {"milliseconds": {"trunk": 1.5}},
        {"milliseconds": {"trunk": {"median": "1"}}},
    ],
    ids=str,
)
def test_a_damaged_entry_is_measured_anew(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, wrong: dict[str, Any]
) -> None:
    plan = tiny_plan(MEASURED)
    plans: dict[str, Plan] = {choose.BASELINE: plan}
    assert choose._is_whole(WHOLE, plans) and not choose._is_whole([], plans)
    at = {"here": 1}
    monkeypatch.setattr(choose, "_circumstances", lambda *_: at)
    monkeypatch.setattr(choose, "measure", lambda *_: WHOLE)
    choose._write({json.dumps(at): {**WHOLE, **wrong}})
    prepared = prepare(plan)
    found = [choose._find(plans, prepared, CPU, Progress()) for _ in range(2)]
    assert [one["cached"] for one in found] == [False, True]
    assert choose.format_result(found[1]).startswith("attention by trunk")


def test_a_result_that_cannot_be_kept_leaves_nothing_aside(home: Path) -> None:
    cache_file().mkdir(parents=True)
    choose._write({})
    assert [p.name for p in cache_file().parent.iterdir()] == ["attention.json"]


def test_layers_without_attention_do_not_count(tiny_plan: Callable[..., Plan]) -> None:
    more = ("model.layers=5", "techniques.short_convolution.between=1", "goal.steps=1")
    folder = trainer.run(tiny_plan(MEASURED, *more), catalogue=of(Fast)).folder
    assert tiny.report(folder)["attention"]["at"]["layers"] == 2


def test_calls_are_compiled_where_the_plan_compiles(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = []

    def compiled(function: Any, **how: Any) -> Any:
        asked.append((type(function.__self__), how["backend"]))
        return function

    monkeypatch.setattr(torch, "compile", compiled)
    plan = tiny_plan(MEASURED, "techniques.torch_compile={backend='aot_eager',scope='block'}")
    plans, _ = candidates(plan, of(Fast), CPU)
    found = choose._find(plans, prepare(plan), CPU, Progress())
    assert found["at"]["compiled_by"] == "aot_eager"
    assert asked == [(Sdpa, "aot_eager"), (Quick, "aot_eager")]


def test_slopes_are_those_of_a_tensor_ranks_heads(tiny_plan: Callable[..., Plan]) -> None:
    split = ("mesh.tensor=2", "techniques.tensor_parallel={}", "model.kv_heads=2")
    plan = tiny_plan(MEASURED, "techniques.alibi={}", *split)
    plans, _ = candidates(plan, of(Inclined), CPU)
    found = choose._find(plans, prepare(plan), CPU, Progress())
    assert found["at"]["heads"] == plan.model.heads // 2
    assert not found["refused"] and found["milliseconds"].keys() == {"trunk", "inclined"}


def test_masks_are_the_runs(tiny_plan: Callable[..., Plan], slow_baseline: None) -> None:
    """Check that backends are measured under the run's masks: documents and a sliding window."""
    overrides = (
        "techniques.document_packing={}",
        "techniques.sliding_window={window=4,between=1}",
    )
    plan = tiny_plan(MEASURED, "model.layers=2", "goal.steps=1", *overrides)
    folder = trainer.run(plan, catalogue=of(Fast)).folder
    found = tiny.report(folder)["attention"]
    assert found["chosen"] == "fast" and not found["at"]["compiled_by"]
    assert found["at"]["documents"] >= 8 and "window=4" in found["at"]["mask"]
    capped = tiny_plan(MEASURED, "techniques.logit_soft_cap={}")
    context = make_context(capped, CPU)
    assert candidates(capped, of(Fast), CPU)[0].keys() == {"trunk", "fast"}
    value, text = explain_plan(capped, context)  # nothing is measured to explain
    assert value["attention"] == "measured" and tells(text, "fastest", "run starts")
    with pytest.raises(ConfigError, match="none were given"):
        trainer.run(capped, progress=Progress())


def test_patience_ends(tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Check that with no patience left each backend is still timed once."""
    monkeypatch.setattr(choose, "PATIENCE_S", 0.0)
    asked = []
    monkeypatch.setattr(choose, "_seconds", lambda device, what, calls: asked.append(calls) or 1.0)
    plan = tiny_plan(MEASURED)
    found = choose._find(candidates(plan, of(Fast), CPU)[0], prepare(plan), CPU, Progress())
    assert asked == 2 * (choose.WARMUP + 1) * 2 * [1]  # two backends, each of two parts
    assert found["milliseconds"]["fast"] == {"median": 2000, "low": 2000, "high": 2000}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("packed", [False, True])
def test_a_gpu_has_several_to_choose_from(tiny_plan: Callable[..., Plan], packed: bool) -> None:
    more = ["techniques.document_packing={}"] if packed else []
    plan = tiny_plan(
        MEASURED,
        "device=cuda",
        "model.dim=128",
        "model.layers=2",
        "goal.steps=2",
        "data.sequence_length=64",
        *more,
    )
    folder = trainer.run(plan, catalogue=catalogue()).folder
    found = tiny.report(folder)["attention"]
    assert found["kernels"] and len(found["milliseconds"]) >= 3, found
    best = min(found["milliseconds"], key=lambda name: found["milliseconds"][name]["median"])
    assert found["chosen"] == best and all(t["low"] > 0 for t in found["milliseconds"].values()), (
        found
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_own_kernels_are_named(tiny_plan: Callable[..., Plan]) -> None:
    shape = ("model.dim=128", "data.sequence_length=64", "goal.steps=2", "checkpoint.every_steps=0")
    folder = trainer.run(tiny_plan("device=cuda", *shape)).folder
    found = tiny.report(folder)["attention"]
    assert found["kernels"] and FLASH not in found["kernels"], found
    assert found["detail"].startswith("torch ran scaled_dot_product")
    assert "not seen" not in found["detail"]


@pytest.mark.parametrize("name", ["flash_attention", "linear_attention"])
def test_a_plan_cannot_name_one_and_have_it_chosen(
    tiny_plan: Callable[..., Plan], name: str
) -> None:
    with pytest.raises(ConfigError, match=rf"attention = 'measured'.*{name}"):
        tiny_plan(MEASURED, f"techniques.{name}={{}}")

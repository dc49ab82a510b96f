"""Time and memory of several ranks, foreseen: signs, ratios, what is said, and layouts ranked."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from facts import in_order, tells

from headrace.assemble.build import make_ledger, make_ledgers
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import UnsupportedError
from headrace.costs.ledger import Ledger
from headrace.costs.links import (
    COMMUNICATOR_BYTES,
    NODE,
    Link,
    assumed,
    collective_s,
    sent,
)
from headrace.costs.machine import Machine
from headrace.costs.rates import StreamPoint, StreamRates
from headrace.costs.step import step_time
from headrace.costs.work import CONTENTION, EDGE_S, Collective, Matmul, collective
from headrace.parallel.pipeline import bubble
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.plan.technique import Card, Catalogue, Stage, Supported, Technique
from headrace.predict.calibration import Calibration
from headrace.predict.layouts import groups, layouts
from headrace.predict.page import format_prediction
from headrace.predict.prediction import PART_NAMES, Prediction, predict
from headrace.predict.sweep import sweep

H200 = Machine.assumed("NVIDIA H200")
SHAPES = Path(__file__).parents[2] / "benchmarks" / "plans"
EXPOSED, WAIT = PART_NAMES["collective"], PART_NAMES["wait"]
FUNCTIONS = Path(__file__).parents[1] / "probe_ranks.py"
FUSED = ("fused_cross_entropy", "fused_swiglu")
ALONE = ("bf16_parameters", "torch_compile", *FUSED, "cudnn_attention")


def plan_of(shape: str, *overrides: str, with_: tuple[str, ...] = (), **how: Any) -> Plan:
    text = (SHAPES / f"{shape}.toml").read_text()
    return Plan.read(
        text, catalogue(), overrides=overrides, with_=with_, without=how.get("without", ALONE)
    )


def seen(plan: Plan, machine: Machine = H200) -> Prediction:
    return predict(plan, elsewhere(make_context(plan, torch.device("cpu")), machine.name), machine)


def linked(bytes_per_s: float = 360e9, call_s: float = 15e-6, ranks: int = NODE) -> Machine:
    """An H200 whose every link is as fast."""
    links = (
        replace(x, ranks=ranks, stream=StreamRates(call_s, bytes_per_s)) for x in assumed(H200.name)
    )
    return replace(H200, links=tuple(links))


PARALLEL: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "replicas": (("mesh.data=4",), ()),
    "fsdp": (("mesh.data=4",), ("fsdp",)),
    "tensor": (("mesh.tensor=4",), ("tensor_parallel",)),
    "context": (("mesh.context=4",), ("context_parallel",)),
    "pipeline": (
        (
            "mesh.pipeline=4",
            "batch.micro_sequences=2",
            "techniques.pipeline_parallel.balance=layers",
        ),
        ("pipeline_parallel",),
    ),
}


@pytest.fixture(params=PARALLEL)
def plan(request: pytest.FixtureRequest) -> Iterator[Plan]:
    """Yield a plan over four ranks along one axis."""
    overrides, with_ = PARALLEL[request.param]
    yield plan_of("160m", *overrides, with_=with_)


# --- pieces ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "share"),
    [
        ("all_reduce", 1.5),
        ("all_gather", 0.75),
        ("reduce_scatter", 0.75),
        ("all_to_all", 0.75),
        ("send", 1.0),
    ],
)
def test_a_ring_sends_what_its_formula_says(operation: Any, share: float) -> None:
    assert sent(operation, 1000, 4) == 1000 * share
    assert sent(operation, 1000, 1) == (1000 if operation == "send" else 0)


def test_a_link_is_known_for_as_many_ranks_as_it_was_measured_over() -> None:
    points = (StreamPoint(2**10, 1e-5), StreamPoint(2**20, 1e-3))
    two = Link("all_reduce", 2, StreamRates(1e-5, 1e9, points))
    four = Link("all_reduce", 4, StreamRates(1e-5, 5e8))
    known = (four, two)
    assert collective_s(known, "x", "all_reduce", 2**20, 2) == pytest.approx(1e-3)
    assert collective_s(known, "x", "all_reduce", 2**20, 3) == pytest.approx(1e-5 + 2**20 / 5e8)
    with pytest.raises(UnsupportedError, match="measured for 4") as error:
        collective_s(known, "x", "all_reduce", 2**20, 8)
    assert "torchrun --nproc-per-node 8" in error.value.remedy.text
    with pytest.raises(UnsupportedError, match=in_order("assumed for 8", "network")):
        collective_s((), "NVIDIA H200", "send", 1, 9)


def test_what_kernels_hide_counts_by_contention_alone() -> None:
    compute = Matmul("forward", 4, (4096, 4096, 4096))
    compute_s, machine = compute.seconds(H200), linked(call_s=1e-9)
    sizes = {"shard_ranks": 2.0, "shard_reach": 2.0}

    def step(share: float, beside: Any, micros: float = 3, **how: Any) -> float:
        """Return what a transfer adds to a step, as a multiple of a micro-batch's compute time."""
        gather = collective(
            sizes,
            "shard",
            "forward",
            "all_gather",
            2 * share * compute_s * 360e9,
            beside=beside,
            **how,
        )
        whole = step_time({"x": compute, "shards/x": gather}, machine, micros)
        assert whole.of("product") == pytest.approx(micros * compute_s)
        return whole.of("collective") / compute_s

    assert step(0.5, "") == pytest.approx(3 * 0.5, rel=1e-3)
    assert step(0.5, "blocks") == pytest.approx(3 * CONTENTION * 0.5, rel=1e-3)
    assert step(1.5, "blocks") == pytest.approx(3 * (CONTENTION + 0.5), rel=1e-3)
    assert step(0.5, "attention") == pytest.approx(3 * 0.5, rel=1e-3)  # there is none
    assert step(0.5, "blocks", last=True) == pytest.approx(CONTENTION * 0.5, rel=1e-3)
    idle = step_time({"x": compute}, machine, 3, idle=0.25)
    assert idle.of("wait") == pytest.approx(compute_s)


# --- plans -----------------------------------------------------------------------------------


def test_a_time_is_told_with_its_parts_and_without_an_interval(plan: Plan) -> None:
    found = seen(plan)
    assert found.time.step_s and found.time.parts_s[EXPOSED] > 0 and found.time.step_between is None
    assert sum(found.time.parts_s.values()) == pytest.approx(found.time.step_s)
    assert tells(found.time.no_interval, "no step", "several GPUs", "measured")
    text = format_prediction(plan, found)
    assert "exposed communication" in text and "between 4 ranks: 360 GB/s" in text
    assert "assumed: 80% of 450 GB/s (NVLink 4" in text and "no interval" in text
    assert json.loads(json.dumps(found.to_dict()))["between_ranks"]


def test_a_link_twice_as_fast_halves_what_is_exposed(plan: Plan) -> None:
    one, two = (seen(plan, linked(360e9 * f, 15e-6 / f)) for f in (1, 2))
    assert one.time.step_s and two.time.step_s and two.time.step_s < one.time.step_s
    overlaps = any(isinstance(w, Collective) and w.beside for w in ledger_of(plan).work.values())
    ratio = two.time.parts_s[EXPOSED] / one.time.parts_s[EXPOSED]
    assert ratio == pytest.approx(0.5, rel=1e-6) if not overlaps else 0.2 < ratio <= 0.5 + 1e-9
    for name, spent_s in one.time.parts_s.items():
        if name not in (EXPOSED, WAIT, "waiting for launches"):
            assert two.time.parts_s[name] == pytest.approx(spent_s)


def ledger_of(plan: Plan) -> Ledger:
    return make_ledger(plan, elsewhere(make_context(plan, torch.device("cpu")), H200.name))


@pytest.mark.parametrize("name", PARALLEL)
def test_more_ranks_send_for_a_larger_share_of_the_step(name: str) -> None:
    (layout, *more), with_ = PARALLEL[name]
    shares = []
    for ranks in (2, 4):
        plan = plan_of("160m", layout.replace("4", str(ranks)), *more, with_=with_)
        found = seen(plan)
        assert found.time.step_s
        lost = found.time.parts_s[EXPOSED] + found.time.parts_s.get(WAIT, 0.0)
        shares.append(lost / found.time.step_s)
    assert 0 < shares[0] < shares[1] < 1, shares


@pytest.mark.parametrize("name", PARALLEL)
def test_ranks_share_the_work(name: str) -> None:
    """Check that each of four ranks has its part of the work, and that their step is shorter."""
    overrides, with_ = PARALLEL[name]
    alone = seen(plan_of("160m", *overrides[1:2]))
    four = seen(plan_of("160m", *overrides, with_=with_))
    assert (
        alone.time.step_s
        and four.time.step_s
        and alone.time.step_s / 4 < four.time.step_s < alone.time.step_s
    )
    for kind in ("matrix products", "attention"):
        share = four.time.parts_s[kind] / alone.time.parts_s[kind]
        # The slowest stage has the head as well; blocks of few tokens are slower.
        least, most = (0.2, 0.5) if name == "pipeline" else (0.245, 0.4)
        assert least < share < most, (kind, share)


def test_stages_together_do_what_one_rank_does() -> None:
    overrides, with_ = PARALLEL["pipeline"]
    plan, alone = plan_of("160m", *overrides, with_=with_), plan_of("160m", overrides[1])
    context = elsewhere(make_context(plan, torch.device("cpu")), H200.name)
    each = make_ledgers(plan, context)
    assert len(each) == 4
    for name, piece in ledger_of(alone).work.items():
        stages = [ledger.work[name] for ledger in each if name in ledger.work]
        moved = sum(one.count * max(1.0, getattr(one, "bytes", 0.0)) for one in stages)
        assert moved == pytest.approx(piece.count * max(1.0, getattr(piece, "bytes", 0.0))), name


def test_a_pipeline_waits_as_its_bubble_says() -> None:
    for rows, chunks in ((2, 1), (4, 1), (2, 2)):
        how = "interleaved" if chunks > 1 else "1f1b"
        plan = plan_of(
            "160m",
            "mesh.pipeline=4",
            f"batch.micro_sequences={rows}",
            f'techniques.pipeline_parallel={{schedule="{how}", chunks={chunks}, balance="layers"}}',
        )
        found, micros = seen(plan), plan.rows_per_step // rows
        assert found.time.step_s
        sent_s = found.time.parts_s[EXPOSED]
        passes_s = found.time.step_s - EDGE_S - found.time.parts_s["the update"]
        share = found.time.parts_s[WAIT] / passes_s
        assert share == pytest.approx(bubble(4, micros, chunks), rel=0.01), sent_s


def test_fsdp_hides_its_gathers_and_tensor_parallel_nothing() -> None:
    fsdp, tensor = (
        seen(plan_of("1b", *PARALLEL[n][0], with_=PARALLEL[n][1])) for n in ("fsdp", "tensor")
    )
    for found, name in ((fsdp, "fsdp"), (tensor, "tensor")):
        plan = plan_of("1b", *PARALLEL[name][0], with_=PARALLEL[name][1])
        ledger = ledger_of(plan)
        pieces = [w for w in ledger.work.values() if isinstance(w, Collective)]
        whole_s = sum(
            w.seconds(H200)
            * (1 if w.last or w.phase == "optimizer" else ledger.sizes["micro_batches"])
            for w in pieces
        )
        share = found.time.parts_s[EXPOSED] / whole_s
        assert share == pytest.approx(1) if name == "tensor" else share < 0.45, (name, share)


def test_buffers_of_communicators_are_told_and_taken_from_the_memory() -> None:
    alone, plan = (
        seen(plan_of("160m")),
        plan_of("160m", "mesh.tensor=2", "mesh.data=2", with_=("tensor_parallel",)),
    )
    found = seen(plan)
    assert not alone.memory.buffers_bytes and not alone.rates.between_ranks
    assert found.memory.buffers_bytes == 3 * COMMUNICATOR_BYTES  # the world's, data's and tensor's
    assert found.memory.capacity_bytes == alone.memory.capacity_bytes - found.memory.buffers_bytes
    assert tells(format_prediction(plan, found), "buffers 576.0 MiB", "assumed", "3 communicators")
    full = replace(H200, memory_bytes=int(found.memory.peak_bytes + H200.context_bytes + 2**20))
    assert (
        seen(plan, full).memory.fits == "no"
        and seen(
            plan, replace(full, memory_bytes=int(full.memory_bytes + found.memory.buffers_bytes))
        ).memory.fits
        != "no"
    )


def test_nodes_that_nobody_joined_have_no_time() -> None:
    plan = plan_of("160m", "mesh.data=16", with_=("fsdp",))
    found = seen(plan)
    assert (
        found.time.step_s is None and "16 ranks" in found.time.unknown and found.memory.peak_bytes
    )
    assert "network" in found.time.unknown
    assert seen(plan, linked(ranks=16)).time.step_s
    within = plan_of("160m", "mesh.data=2", "mesh.tensor=4", with_=("tensor_parallel",))
    assert seen(within).time.step_s


@pytest.mark.parametrize(
    ("overrides", "with_", "says"),
    [
        (("mesh.context=2",), ("context_parallel", "document_packing"), "ranks hold parts"),
        (("mesh.context=2",), ("context_parallel", "sliding_window"), "ranks hold parts"),
        (("mesh.tensor=2",), ("tensor_parallel", "float8_linear"), "casts"),
    ],
)
def test_what_nobody_counted_has_no_time(
    overrides: tuple[str, ...], with_: tuple[str, ...], says: str
) -> None:
    found = seen(plan_of("1b", *overrides, with_=with_))
    assert found.time.step_s is None and says in found.time.unknown and found.memory.peak_bytes


def test_one_devices_steps_say_nothing_of_what_is_sent(plan: Plan) -> None:
    context = elsewhere(make_context(plan, torch.device("cpu")), H200.name)
    phases = ("forward", "recompute", "backward", "optimizer")
    slower = Calibration(dict.fromkeys(phases, 1.5), 0.0, "other", 20)  # type: ignore[arg-type]
    one, two = predict(plan, context, H200), predict(plan, context, H200, slower)
    assert one.time.parts_s[EXPOSED] == pytest.approx(two.time.parts_s[EXPOSED])
    assert two.time.parts_s["matrix products"] == pytest.approx(
        1.5 * one.time.parts_s["matrix products"]
    )
    assert two.time.step_between is None


# --- layouts ---------------------------------------------------------------------------------


def test_layouts_are_all_and_each_brings_its_technique() -> None:
    known, plan = catalogue(), plan_of("160m", "mesh.data=8")
    every = {words for words, _ in layouts(plan, known, near=False)}
    assert len(every) == 19  # of 8 over four axes, but for the plan's own
    for words in every:
        for axis in ("tensor", "context", "pipeline"):
            named = any(word.startswith(f"mesh.{axis}=") for word in words)
            assert named == (f"+{axis}_parallel" in words)
    near = {words for words, _ in layouts(plan, known, near=True)}
    assert near < every and len(near) == 3 and all("mesh.data=4" in words for words in near)
    split = plan_of("160m", "mesh.tensor=8", with_=("tensor_parallel",))
    back = {words for words, _ in layouts(split, known, near=False)}
    assert ("mesh.data=8", "mesh.tensor=1", "-tensor_parallel") in back
    none = Catalogue({n: k for n, k in known.techniques.items() if not k.axes}, known.families)
    assert not list(layouts(plan, none, near=False))


def test_groups_of_ranks_are_proposed_where_something_is_divided() -> None:
    known = catalogue()
    assert not list(groups(plan_of("160m", "mesh.data=8"), known, near=False))
    sliced = plan_of("160m", "mesh.data=8", with_=("fsdp",))
    assert [*groups(sliced, known, near=False)] == [("mesh.replicate=2",), ("mesh.replicate=4",)]
    assert [*groups(sliced, known, near=True)] == [("mesh.replicate=2",)]
    mixed = plan_of(
        "160m", "mesh.data=8", with_=("mixture_of_experts",), without=(*ALONE, "swiglu")
    )
    words = [*groups(mixed, known, near=False)]
    assert words == [(f"mesh.expert={n}", "+expert_parallel") for n in (2, 4, 8)]
    divided = changed(mixed, words[1], known)
    assert [*groups(divided, known, near=False)] == [
        ("mesh.expert=1", "-expert_parallel"),
        ("mesh.expert=2",),
        ("mesh.expert=8",),
    ]
    assert ("mesh.data=4", "mesh.tensor=2", "+tensor_parallel") in {
        words for words, _ in layouts(divided, known, near=False)
    }


def test_experts_that_are_divided_take_less_memory() -> None:
    mixed = plan_of(
        "160m", "mesh.data=8", with_=("mixture_of_experts",), without=(*ALONE, "swiglu")
    )
    place = elsewhere(make_context(mixed, torch.device("cpu")), H200.name)
    found = sweep(mixed, place, linked(ranks=8), catalogue(), limit=150)
    peaks = {
        n: seen(changed(mixed, ("+expert_parallel", f"mesh.expert={n}"), catalogue()))
        for n in (2, 4, 8)
    }
    each = [peaks[n].memory.peak_bytes for n in (2, 4, 8)]
    assert found.start.prediction.memory.peak_bytes > each[0] > each[1] > each[2]
    assert any("+expert_parallel" in c.changes for c in found.ranked)
    assert all(one.time.step_s and one.time.step_between is None for one in peaks.values())


def test_a_mixture_is_priced_by_its_choices_and_by_its_experts() -> None:
    """Check signs: more choices cost products, more experts cost updates and their reading."""

    def priced(*words: str, without: tuple[str, ...] = ALONE) -> Prediction:
        keys = [f"techniques.mixture_of_experts.{word}" for word in words]
        return seen(plan_of("160m", *keys, with_=("mixture_of_experts",), without=without))

    two, four = priced("expert_ffn=1024"), priced("expert_ffn=1024", "top_k=4")
    products, update = PART_NAMES["product"], "the update"
    assert four.time.parts_s[products] > 1.2 * two.time.parts_s[products]
    assert four.time.parts_s[update] == two.time.parts_s[update]
    many = priced("expert_ffn=1024", "experts=32")
    assert many.time.parts_s[update] > 2 * two.time.parts_s[update]
    traffic = PART_NAMES["stream"]
    assert many.time.parts_s[traffic] > two.time.parts_s[traffic]
    assert two.time.no_interval and two.time.step_between is None
    left = tuple(name for name in ALONE if name != "torch_compile")
    fused = priced("expert_ffn=1024", without=left).time
    assert fused.step_s and two.time.step_s and fused.step_s < two.time.step_s


def test_ranks_that_divide_experts_exchange_rows_and_update_fewer() -> None:
    whole = plan_of("160m", "mesh.data=8", with_=("mixture_of_experts",))
    divided = changed(whole, ("+expert_parallel", "mesh.expert=4"), catalogue())
    ledgers = [ledger_of(plan) for plan in (whole, divided)]
    flops = [
        sum(p.flops * p.count for p in one.work.values() if isinstance(p, Matmul))
        for one in ledgers
    ]
    assert flops[0] == pytest.approx(flops[1]), "rows of four ranks for a fourth of the experts"
    before, after = (one.work["update/optimizer"] for one in ledgers)
    kept = [one.memory["parameters"].bytes for one in ledgers]
    assert after.bytes / before.bytes == pytest.approx(kept[1] / kept[0])  # pyright: ignore
    casts = [one.memory["0/weight_cast"].bytes for one in ledgers]
    assert casts[1] < 0.4 * casts[0], "a rank casts its own experts alone"
    assert "experts/to_experts" in ledgers[1].work and EXPOSED in seen(divided).time.parts_s
    third = changed(whole, ("+expert_parallel", "mesh.expert=8"), catalogue())
    uneven = third.model_copy(
        update={"techniques": {**third.techniques, "mixture_of_experts": nine(third)}}
    )
    more = ledger_of(uneven).work["experts.down/result"].count
    assert more == pytest.approx(12 * 2 / 9 * 8), "the rank with most has two of nine experts"


def nine(plan: Plan) -> Any:
    """Return the plan's mixture with nine experts."""
    return plan.techniques["mixture_of_experts"].model_copy(update={"experts": 9})


def test_experts_beside_tensor_parallelism_are_priced() -> None:
    plan = plan_of(
        "160m",
        *("mesh.data=2", "mesh.expert=2", "mesh.tensor=2"),
        with_=("mixture_of_experts", "expert_parallel", "tensor_parallel"),
    )
    assert seen(plan).time.step_s, seen(plan).time.unknown


@pytest.mark.parametrize("limit", [120, pytest.param(300, marks=pytest.mark.slow)])
def test_a_sweep_ranks_many_layouts_and_sets(limit: int) -> None:
    plan = plan_of("1b", "mesh.data=8", without=())
    context = elsewhere(make_context(plan, torch.device("cpu")), H200.name)
    found = sweep(plan, context, H200, catalogue(), limit=limit)
    meshes = {tuple(c.plan.mesh.model_dump().values()) for c in found.ranked}
    assert len(found.ranked) > 0.4 * limit and len(meshes) > 8, (len(found.ranked), meshes)
    assert all(c.plan.mesh.ranks == 8 for c in found.ranked)
    times = [c.prediction.time.step_s for c in found.ranked if c.prediction.memory.fits == "yes"]
    assert times == sorted(times, key=lambda s: s or 0.0)


class Chatty(Technique[Any]):
    """Tells its own collective."""

    stage: ClassVar[Stage] = Stage.STEP
    timed: ClassVar[bool] = True
    axes: ClassVar[tuple[str, ...]] = ("tensor",)
    card: ClassVar[Card] = Card("", "", "", "", "")

    @classmethod
    def name(cls) -> str:
        return "chatty"

    def supports(self, context: Any) -> Supported:
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        more = collective(ledger.sizes, "tensor", "forward", "all_to_all", 2**30)
        return replace(ledger, work={**ledger.work, "chat": more})


def test_a_technique_that_lands_later_enters_by_its_own_predict() -> None:
    known = Catalogue({"chatty": Chatty}, catalogue().families)
    text = (SHAPES / "160m.toml").read_text().split("[techniques")[0]
    plan = Plan.read(text, known, overrides=["mesh.tensor=2"], with_=["chatty"])
    found = seen(plan)
    a_gibibyte_s = collective_s((), H200.name, "all_to_all", 2**29, 2)
    micros = plan.rows_per_step // plan.micro_rows
    assert found.time.parts_s[EXPOSED] == pytest.approx(micros * a_gibibyte_s, rel=0.1)
    start = Plan.read(text, known, overrides=["mesh.data=2"])
    assert ("mesh.data=1", "mesh.tensor=2", "+chatty") in {
        words for words, _ in layouts(start, known, near=True)
    }


# --- probes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", ["measured", pytest.param("slower", marks=pytest.mark.slow)])
def test_ranks_measure_their_links(zygote: Any, tmp_path: Path, function: str) -> None:
    zygote.call(2, tmp_path, FUNCTIONS, function, home=str(tmp_path))


def test_a_file_of_before_links_is_still_read() -> None:
    told = json.loads(H200.to_json())
    assert told.pop("links") == []
    assert Machine.from_json(json.dumps(told)) == H200
    kept = linked()
    assert Machine.from_json(kept.to_json()) == kept

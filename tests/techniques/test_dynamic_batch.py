"""A step that runs out of memory is taken again in smaller parts, and computes the same."""

import gc
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from facts import in_order
from tiny import report, tensors
from torch import Tensor

from headrace.assemble.build import make_build, make_ledger
from headrace.assemble.context import make_context
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import RunError, UnsupportedError
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.model.mask import Rows
from headrace.parallel.world import World
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.memory import dynamic_batch
from headrace.techniques.memory.dynamic_batch import DynamicBatch, MicroBatchSize, cut, halves
from headrace.train import train as trainer
from headrace.train.train import step

NAME = "dynamic_batch"
ON = f"techniques.{NAME}={{}}"
ROWS = 8
"""Tokens of a step of the tiny plan."""
FULL = "CUDA out of memory. Tried to allocate 1.00 GiB."


def run_out(build: Build, most: int, *, forward: bool = True, after: int = 0) -> Build:
    """Let micro-batches of more than `most` rows run out of memory, from step `after` on.

    In the forward pass before the last block, or at the very end of the backward pass.
    """
    rows = [0]
    build.model.register_forward_pre_hook(lambda model, given: rows.append(given[0].size(0)))

    def allocate(*_: Any) -> None:
        late = torch.is_grad_enabled() or not forward
        if rows[-1] > most and late and build.now.get("step", 0) >= after:
            raise torch.OutOfMemoryError(FULL)

    if forward:
        last = list(build.model.blocks.values())[-1]
        last.register_forward_pre_hook(allocate)
    else:
        build.model.embed.weight.register_hook(allocate)
    return build


def ran(plan: Plan, **how: Any) -> Path:
    """Run a plan and return its folder."""
    folder = trainer.run(plan, **how).folder
    return folder


@pytest.mark.parametrize(("saved", "rows"), [(12, 12), (7, 6), (5, 3), (2, 1), (99, 12)])
def test_a_resume_takes_rows_that_divide_the_plans(saved: int, rows: int) -> None:
    (size := MicroBatchSize(12, 16, 0)).load_values({"rows": saved, "shrinks": 2})
    assert size.values() == {"rows": rows, "shrinks": 2} and size.numbers["rows"] == rows


def test_what_an_interrupted_pass_has_left_is_let_go(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny("techniques.mixture_of_experts.experts=4")
    before, drawn = dynamic_batch.random_state(build.device), torch.rand(3)
    layer = build.model.blocks["0"].mlp
    build.model.hidden(ids := torch.arange(8)[None], Rows(ids)).sum().backward()
    assert layer.kept_balance is not None
    dynamic_batch.let_go(build, before)
    left = [layer.kept_balance, *(p.grad for p in build.model.parameters())]
    assert all(x is None for x in left) and torch.rand(3).equal(drawn)


@pytest.mark.parametrize("after", [0, 1])
def test_a_run_that_shrinks_is_the_smaller_run(
    after: int, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, stream and validation; and a resume begins small. Step 1 is the tracked one."""
    short = ("goal.steps=4", "checkpoint.every_steps=2", "eval.every_steps=4", "model.layers=2")
    small = ran(tiny_plan("batch.micro_sequences=2", *short))
    plan = tiny_plan(ON, "name=mine", *short)
    with monkeypatch.context() as patched:
        patched.setattr(
            trainer,
            "make_build",
            lambda *a, **k: run_out(make_build(*a, **k), 2, after=after, forward=not after),
        )
        mine = ran(plan)
    before, found = report(small), report(mine)
    numbers = found["techniques"][NAME]["numbers"]
    assert (numbers["began_with"], numbers["rows"], numbers["shrinks"]) == (ROWS, 2, 2)
    assert found["stream_sha256"] == before["stream_sha256"]
    assert found["guard"]["compared"]
    rtol, atol = (1e-4, 1e-6) if after else (0.0, 0.0)
    right = tensors(small / "checkpoints" / "step-4")
    for name, tensor in tensors(mine / "checkpoints" / "step-4").items():
        torch.testing.assert_close(tensor, right[name], rtol=rtol, atol=atol)
    ends = [r["val"][-1]["loss_nats"] for r in (found, before)]
    assert ends[0] == pytest.approx(ends[1], rel=1e-6 if not after else 1e-4)
    kept = tensors(mine / "checkpoints" / "step-4")
    mine = ran(plan, resume=True, checkpoint="step-2")
    again = report(mine)
    numbers = again["techniques"][NAME]["numbers"]
    assert (numbers["began_with"], numbers["rows"], numbers["shrinks"]) == (ROWS, 2, 2)
    assert again["stream_sha256"] == before["stream_sha256"]
    for name, tensor in tensors(mine / "checkpoints" / "step-4").items():
        assert torch.equal(tensor, kept[name]), name


EXPERTS = "techniques.mixture_of_experts={experts=4}"
CHECKPOINT = "techniques.selective_checkpoint={}"
BESIDE: dict[str, tuple[bool, tuple[str, ...]]] = {
    "experts": (
        True,
        (EXPERTS, CHECKPOINT, "techniques.z_loss={}", "techniques.document_packing={}"),
    ),
    "compiled": (
        True,
        (
            'techniques.torch_compile={backend="aot_eager", scope="block"}',
            EXPERTS,
            "techniques.distillation={}",
        ),
    ),
    "short rows": (
        False,
        (
            "techniques.sequence_length_schedule={start=4}",
            "techniques.fp16_loss_scaling={}",
            "techniques.stochastic_depth={rate=0.6}",
        ),
    ),
    "twice": (
        False,
        ("techniques.sophia={every=1}", "techniques.chunked_cross_entropy={chunk_tokens=7}"),
    ),
    "bf16": (False, ("techniques.bf16_parameters={}",)),
}
"""(whether the forward pass runs out of memory, or the backward pass; what else is on)"""


@pytest.mark.parametrize(
    ("forward", "more"),
    [
        pytest.param(*asked, id=name, marks=[pytest.mark.slow] * (name == "compiled"))
        for name, asked in BESIDE.items()  # a set of the contract compiles it
    ],
)
def test_steps_are_those_of_smaller_micro_batches(
    more: tuple[str, ...],
    forward: bool,
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
) -> None:
    """To the bit, whatever an interrupted pass has left behind."""
    right, mine = make_tiny("batch.micro_sequences=4", *more), make_tiny(ON, *more)
    short = "sequence_length_schedule" in mine.plan.techniques  # four rows of each
    run_out(mine, 16 if short else 4, forward=forward)
    for index in range(2):
        found, wanted = (step(build, batch(build), index) for build in (mine, right))
        assert torch.equal(found, wanted)
    for name, weight in right.model.named_parameters():
        assert torch.equal(mine.model.get_parameter(name), weight), name
    assert (mine.notes[NAME].rows, mine.notes[NAME].shrinks) == (4, 1)
    evidence = check_active(mine)
    assert evidence[NAME].numbers["micro_batches"] == (8 if "sophia" in evidence else 4)
    if "fp16_loss_scaling" in evidence:
        assert evidence["fp16_loss_scaling"].numbers["passes"] == 2


def test_micro_batches_above_what_fits_are_no_evidence(
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    build = make_tiny(ON)
    step(build, batch(build), 0)
    technique, size = build.plan.techniques[NAME], build.notes[NAME]
    assert technique.active(build).active and size.numbers["too_long"] == 0
    size.rows -= 1
    monkeypatch.setattr(size, "cut", list)  # as they come
    step(build, batch(build), 1)
    assert not technique.active(build).active


def test_the_same_random_numbers_come_again() -> None:
    build: Any = SimpleNamespace(
        auxiliary=[],
        compiled=[],
        device=torch.device("cpu"),
        world=World(),
        model=torch.nn.Linear(1, 1),
        note_line=lambda text: None,
    )
    drawn: list[float] = []

    def inner(build: Any, works: Any, objective: Any, scale: Any) -> Tensor:
        for work in works:
            drawn.append(float(torch.rand(())))
            if len(work.ids_BT) > 1:
                raise RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to ...")
        return torch.zeros(())

    ids_BT = torch.arange(8).view(4, 2)
    work = dynamic_batch.MicroBatch(
        ids_BT, ids_BT + 1, dynamic_batch.Rows(torch.arange(2)[None]), ids_BT
    )
    torch.manual_seed(0)
    dynamic_batch.guarded(MicroBatchSize(4, 2, 0), inner)(build, [work], None, torch.ones(()))  # type: ignore[arg-type]
    torch.manual_seed(0)
    right = [float(torch.rand(())) for _ in range(4)]
    assert drawn == [right[0], right[0], *right]


def test_a_cut_keeps_every_token_with_what_belongs_to_it() -> None:
    ids_BT = torch.arange(15).view(5, 3)
    rows = dynamic_batch.Rows(ids_BT % 3, ids_BT // 2, torch.arange(5))
    work = dynamic_batch.MicroBatch(
        ids_BT, -ids_BT, rows, ids_BT, {"seen": torch.arange(30).view(15, 2)}
    )
    parts = cut(work, 2)
    assert [len(part.ids_BT) for part in parts] == [2, 2, 1]
    for part in parts:
        assert torch.equal(part.targets_BT, -part.ids_BT)
        segments_BT, prefix_B = part.rows.segments_BT, part.rows.prefix_B
        assert segments_BT is not None and prefix_B is not None and part.extras is not None
        assert torch.equal(segments_BT, part.ids_BT // 2)
        assert torch.equal(prefix_B, part.ids_BT[:, 0] // 3)
        assert torch.equal(part.extras["seen"][:, 0] // 2, part.ids_BT.flatten())
    assert torch.equal(torch.cat([part.index_BT for part in parts]), ids_BT)
    assert cut(work, 5) == [work]
    assert list(halves(12)) == [12, 6, 3, 1] and list(halves(15)) == [15, 5, 1]


def test_one_row_that_does_not_fit_says_what_would(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = run_out(make_tiny(ON), 0)
    with pytest.raises(RunError, match=in_order("16 tokens", "CUDA out of memory")) as caught:
        step(build, batch(build), 0)
    assert "full_checkpoint" in caught.value.remedy.text
    assert build.notes[NAME].shrinks == 3


def test_another_error_is_not_taken_for_memory(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(ON)

    def fail(*_: Any) -> None:
        raise RuntimeError("shapes do not match")

    build.model.register_forward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="shapes"):
        step(build, batch(build), 0)
    assert build.notes[NAME].shrinks == 0


# --- before the run ---------------------------------------------------------------------------


def test_sizes_are_tried_from_large_to_small(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the ledger is sure of is not tried; what fits is the plan's from then on."""
    tried: list[Plan] = []
    told: list[str] = []

    def fits(plan: Plan, limit: int, device: torch.device) -> bool:
        tried.append(plan)
        return plan.micro_rows <= 16

    plan = tiny_plan(ON, "batch.tokens=1024", "eval.tokens=64")

    def made(plan: Plan) -> Build:
        device = torch.device("cpu")
        return make_build(plan, prepare(plan), World(), device, note_line=told.append)

    most = make_ledger(plan, make_context(plan, torch.device("cpu"))).peak()[1]
    monkeypatch.setattr(dynamic_batch, "fits", fits)
    monkeypatch.setattr(dynamic_batch, "free_bytes", lambda device: int(most / 2.5))
    build = made(plan)
    rows = [p.micro_rows for p in tried]
    assert rows == [32, 16]
    assert all(p.rows_per_step == 2 * p.micro_rows and not p.techniques for p in tried)
    assert build.plan.batch.micro_sequences == 16 == build.loader.micro_rows
    assert told[-1] == "batch.micro_sequences=16 fits" and len(told) == 3
    assert build.notes[NAME].numbers["too_large"] == 2
    build.loader.close()
    tried.clear()
    made(build.plan).loader.close()
    assert not tried
    monkeypatch.setattr(dynamic_batch, "free_bytes", lambda device: 1000)
    with pytest.raises(UnsupportedError, match=in_order("16 tokens", "950 B")) as caught:
        made(plan)
    assert ("data.sequence_length=8",) in caught.value.remedy.changes
    with pytest.raises(UnsupportedError, match=in_order("16 tokens", "400 B")):
        made(tiny_plan(f"techniques.{NAME}.headroom=0.6", "batch.tokens=1024", "eval.tokens=64"))


@pytest.mark.parametrize(
    ("held", "cached", "free"), [(70, 50, 80), (70, 0, 30), (10, 20, 100), (120, 5, 0)]
)
def test_files_that_a_group_has_read_are_free(
    held: int, cached: int, free: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {
        "/proc/meminfo": "MemTotal: 9 kB\nMemAvailable: 5 kB\n",
        "/sys/fs/cgroup/memory.max": "100\n",
        "/sys/fs/cgroup/memory.current": f"{held}\n",
        "/sys/fs/cgroup/memory.stat": f"anon 7\ninactive_file {cached}\nactive_file 3\n",
    }
    for name, text in files.items():
        (tmp_path / name.rpartition("/")[2]).write_text(text)
    monkeypatch.setattr(dynamic_batch, "Path", lambda path: tmp_path / str(path).rpartition("/")[2])
    assert dynamic_batch.free_bytes(torch.device("cpu")) == free
    (tmp_path / "memory.max").write_text("max\n")
    assert dynamic_batch.free_bytes(torch.device("cpu")) == 5 * 1024


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch, zygote: Any, tmp_path: Path) -> None:
    """Trials run their own program in a real process, which is forked."""
    program = tmp_path / "child.py"
    lines = ("def child(argv):", "import sys", "sys.argv = argv", f"exec({dynamic_batch.CHILD!r})")
    program.write_text("\n    ".join(lines))

    def run(command: list[str], **how: Any) -> Any:
        call = [str(program), "child", {"argv": command[2:]}]
        ended = zygote._start(tmp_path, {}, call=call).wait()
        return SimpleNamespace(returncode=ended.code, stderr=ended.err)

    monkeypatch.setattr(
        dynamic_batch, "subprocess", SimpleNamespace(run=run, DEVNULL=None, PIPE=None)
    )


def test_a_child_process_runs_out_of_memory_for_this_one(
    tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch, forked: None
) -> None:
    """Under a limit that one row fits into and two do not."""
    plan = tiny_plan(
        ON,
        "data.sequence_length=256",
        "batch.tokens=512",
        "model.vocab=60000",
        "model.dim=2",
        "model.heads=1",
        "model.ffn=2",
        "data.workers=0",
    )
    monkeypatch.setattr(dynamic_batch, "free_bytes", lambda device: 350_000_000)
    told: list[str] = []
    build = make_build(plan, prepare(plan), World(), torch.device("cpu"), note_line=told.append)
    build.loader.close()
    assert told == [
        f"{NAME} tries micro-batches of 2 rows",
        f"{NAME} tries micro-batches of 1 rows",
        "batch.micro_sequences=1 fits",
    ]
    assert build.plan.micro_rows == 1


def test_a_trial_that_fails_otherwise_is_told(tiny_plan: Callable[..., Plan], forked: None) -> None:
    plan = tiny_plan("data.sources=/nowhere", "batch.micro_sequences=2")
    with pytest.raises(
        RunError, match=in_order("batch.micro_sequences", 2, "ConfigError", "/nowhere")
    ):
        dynamic_batch.fits(plan, 2**40, torch.device("cpu"))


@pytest.mark.slow
def test_a_trial_in_an_interpreter_of_its_own(tiny_plan: Callable[..., Plan]) -> None:
    plan = dynamic_batch.trial(tiny_plan(ON), NAME, 4)
    assert dynamic_batch.fits(plan, 2**34, torch.device("cpu"))


def test_it_refuses_ranks_whose_passes_send_something(tiny_plan: Callable[..., Plan]) -> None:
    plan = tiny_plan(ON, "techniques.fsdp={}", "mesh.data=2")
    answer = DynamicBatch().supports(make_context(plan, torch.device("cpu")))
    assert isinstance(answer, Unsupported) and "collective of fsdp" in answer.reason
    plain = tiny_plan(ON).replaced(mesh=MeshConfig(data=2))
    assert isinstance(DynamicBatch().supports(make_context(plain, torch.device("cpu"))), Supported)


def test_all_ranks_shrink_where_one_is_out_of_memory(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    zygote.call(
        4,
        tmp_path,
        Path(__file__).with_name("dynamic_batch_ranks.py"),
        "shrink",
        corpus=str(corpus),
        prepared=str(prepared_folder),
    )


# --- on a GPU ---------------------------------------------------------------------------------

on_a_gpu = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
WIDE = (
    ON,
    "device=cuda",
    "model.precision=fp32",
    "model.vocab=8192",
    "data.sequence_length=256",
    "batch.tokens=16384",
    "eval.tokens=1024",
)
"""64 rows whose logits take 1.6 GB, a row 25 MB."""


def made_on_gpu(plan: Plan, told: list[str] | None = None) -> Build:
    """Return the build of a plan on the first GPU."""
    note_line = (told if told is not None else []).append
    return make_build(plan, prepare(plan), World(), torch.device("cuda", 0), note_line=note_line)


@pytest.mark.parametrize("case", [pytest.param(None, marks=on_a_gpu, id="cuda")])
def test_a_full_gpu_makes_micro_batches_smaller(case: None, tiny_plan: Callable[..., Plan]) -> None:
    told: list[str] = []
    mine = made_on_gpu(tiny_plan(*WIDE, "batch.micro_sequences=64"), told)
    first = mine.loader.step(0).micros
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    whole = torch.cuda.get_device_properties(0).total_memory
    limit = torch.cuda.memory_reserved() + 600 * 2**20
    try:
        torch.cuda.set_per_process_memory_fraction(limit / whole)
        found = step(mine, first, 0)
        assert torch.cuda.max_memory_reserved() <= limit + 2 * 2**20
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
        mine.loader.close()
    rows = mine.notes[NAME].rows
    assert 4 <= rows < 64 and "CUDA out of memory" in told[-1]
    assert len(told) == mine.notes[NAME].shrinks
    right = made_on_gpu(tiny_plan(*WIDE, f"batch.micro_sequences={rows}"))
    wanted = step(right, right.loader.step(0).micros, 0)
    right.loader.close()
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=0)
    for name, weight in right.model.named_parameters():
        grad, own = weight.grad, mine.model.get_parameter(name).grad
        assert grad is not None and own is not None
        assert (own - grad).norm() <= 1e-4 * grad.norm(), name


@pytest.mark.parametrize("case", [pytest.param(None, marks=on_a_gpu, id="cuda")])
def test_a_child_process_finds_what_fits_a_gpu(
    case: None, tiny_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dynamic_batch, "free_bytes", lambda device: 600 * 2**20)
    told: list[str] = []
    build = made_on_gpu(tiny_plan(*WIDE), told)
    step(build, build.loader.step(0).micros, 0)
    build.loader.close()
    rows = build.plan.batch.micro_sequences
    assert 4 <= rows < 64 and told[-1] == f"batch.micro_sequences={rows} fits"
    assert build.notes[NAME].numbers["too_large"] >= 1
    assert build.notes[NAME].shrinks == 0

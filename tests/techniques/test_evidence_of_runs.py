"""Evidence of data, of compiling and of ranks: each of its reasons must be able to deny it.

What a run would have left is given by hand, one of it missing or wrong at a time.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from pieces import bare, left

from headrace.assemble import adapted
from headrace.assemble.sockets import Build
from headrace.model.convolution import CUDNN, CausalConvolution
from headrace.model.lora import LoraLinear
from headrace.techniques.adapt import distillation, qlora
from headrace.techniques.compile import compile_cache, cuda_graphs, cudnn_autotune, torch_compile
from headrace.techniques.compile.shape_buckets import ShapeBuckets
from headrace.techniques.data.loader_workers import LoaderWorkers, TunedLoader
from headrace.techniques.parallel import context_parallel, fsdp, pipeline_parallel, tensor_parallel
from headrace.techniques.schedule.sequence_length_schedule import SequenceLengthSchedule


def test_documents_are_marked_and_their_own_loss_moves(make_tiny: Callable[..., Build]) -> None:
    build: Any = make_tiny("techniques.document_packing={}")
    technique = build.plan.techniques["document_packing"]
    assert technique.active(build).active
    build.loader.segments = False  # the mask would know of documents, and no row has any
    assert not technique.active(build).active
    build.loader.segments = True
    whole = build.engine

    def leaks(build: Build, works: Any, *given: Any) -> Any:
        """Add a little more than nothing of all ids."""
        return whole(build, works, *given).double() + 1e-9 * works[0].ids_BT.double().sum()

    build.engine = leaks
    assert not technique.active(build).active
    build.engine = lambda *given: torch.ones(())  # nothing moves, so nothing was shown
    assert not technique.active(build).active


@pytest.mark.parametrize(
    ("ahead", "here", "device", "copied", "active"),
    [
        (3, 0, None, 0, True),
        (3, 1, None, 0, False),
        (0, 3, None, 0, False),
        (0, 0, None, 0, False),
        (3, 0, "cuda", 8, True),
        (3, 0, "cuda", 0, False),
    ],
)
def test_rows_are_read_ahead_and_copied_and_not_by_the_training_thread(
    ahead: int, here: int, device: str | None, copied: int, active: bool
) -> None:
    waits = left(read_ahead=ahead, read_here=here, workers=2, copied_bytes=copied)
    loader = bare(TunedLoader, waits=waits, try_one=lambda: None, device=device)
    assert LoaderWorkers().active(left(loader=loader)).active is active


@pytest.mark.parametrize(
    ("before", "elsewhere", "files", "active"),
    [
        (1, False, 1, True),
        (3, False, 1, False),
        (None, False, 1, False),
        (1, True, 1, False),
        (1, False, 0, False),
    ],
)
def test_graphs_were_kept_or_found_by_this_run_in_its_folder(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    before: int | None,
    elsewhere: bool,
    files: int,
    active: bool,
) -> None:
    """The process has 3 hits, and so many of them before the run."""
    hit = f"{next(iter(compile_cache.CACHES))}_hit"
    counted = dict.fromkeys(compile_cache.counted(), 0)
    monkeypatch.setattr(compile_cache, "counted", lambda: counted | {hit: 3})
    technique = compile_cache.CompileCache(directory=str(tmp_path / "cache"))
    kept = technique.folder() / compile_cache.KEPT[0]
    kept.mkdir(parents=True)
    for number in range(files):
        (kept / str(number)).touch()
    seen = {
        "before": None if before is None else counted | {hit: before},
        "folder": "another" if elsewhere else str(technique.folder()),
    }
    assert technique.active(left(notes={"compile_cache": seen})).active is active


@pytest.mark.parametrize(
    ("before", "warm", "begun", "recorded", "active"),
    [
        (0, {1}, 1, 0, True),
        (None, {1}, 1, 0, False),
        (0, set(), 1, 0, False),
        (0, {1}, cuda_graphs.SETTLED, 0, False),
        (0, {1}, cuda_graphs.SETTLED, 1, True),
    ],
)
def test_recordings_are_this_runs_and_have_run(
    monkeypatch: pytest.MonkeyPatch,
    before: int | None,
    warm: set[int],
    begun: int,
    recorded: int,
    active: bool,
) -> None:
    """The first micro-batches of a run warm up, and later ones replay what was recorded."""
    roots = {0: [left(children={})] * recorded}
    manager = left(roots=roots, ids_to_funcs={1: 1}, warmed_up_functions=warm)
    monkeypatch.setattr(
        "torch._inductor.cudagraph_trees.get_manager", lambda *given, **how: manager
    )
    monkeypatch.setattr(cuda_graphs, "skips", lambda: 2)
    run = left(
        device=torch.device("cuda:0"), notes={"cuda_graphs": {"skips": before, "begun": begun}}
    )
    evidence = cuda_graphs.CudaGraphs().active(run)
    assert evidence.active is active
    assert evidence.numbers["skipped"] == (0 if before is None else 2)


@pytest.mark.parametrize(
    ("now", "fullgraph", "active"),
    [((3, 5), True, True), ((2, 5), True, False), ((3, 6), True, False), ((3, 6), False, True)],
)
def test_graphs_are_new_and_whole_where_that_is_asked(
    monkeypatch: pytest.MonkeyPatch, now: tuple[int, int], fullgraph: bool, active: bool
) -> None:
    monkeypatch.setattr(torch_compile, "_graphs", lambda: now)
    run = left(notes={"torch_compile": (2, 5)}, compiled=["blocks"])
    technique = torch_compile.TorchCompile(fullgraph=fullgraph)
    assert technique.active(run).active is active


@pytest.mark.parametrize(
    ("came", "trained", "active"),
    [
        ({(2, 5): 1}, {(2, 8): 1}, True),
        ({(2, 18): 1}, {(2, 18): 1}, True),  # whole rows are no bucket's
        ({(2, 5): 1}, {(2, 8): 1, (2, 5): 1}, False),
        ({}, {}, False),
    ],
)
def test_rows_came_and_were_trained_in_buckets(
    came: dict[Any, int], trained: dict[Any, int], active: bool
) -> None:
    notes = {"came": came, "trained": trained, "padding": 0, "recompiles": 0}
    run = left(notes={"shape_buckets": notes}, plan=left(data=left(sequence_length=18)))
    assert ShapeBuckets(multiple=4).active(run).active is active


@pytest.mark.parametrize(
    ("timed", "plain", "here", "before", "active"),
    [
        (1, 0, True, {CUDNN: 2}, True),
        (1, 0, True, {}, False),  # of another build of this process
        (1, 0, False, {}, None),
        (0, 1, False, {}, False),
        (1, 1, False, {}, False),
    ],
)
def test_cudnn_was_asked_in_each_step_of_this_run(
    monkeypatch: pytest.MonkeyPatch,
    timed: int,
    plain: int,
    here: bool,
    before: dict[str, int],
    active: bool | None,
) -> None:
    monkeypatch.setattr(cudnn_autotune, "libraries", lambda before: before)
    modules = [bare(CausalConvolution)] if here else []
    noted = {"seen": {"timed": timed, "plain": plain}, "before": before}
    run = left(notes={"cudnn_autotune": noted}, model=left(modules=lambda: modules))
    assert cudnn_autotune.CudnnAutotune().active(run).active is active


@pytest.mark.parametrize(
    ("held", "whole", "calls", "sent", "active"),
    [
        (4, 8, 2, 64, True),
        (8, 8, 2, 64, False),
        (0, 0, 2, 64, False),
        (4, 8, 0, 0, False),
        (4, 8, 2, 0, False),
    ],
)
def test_rows_are_cut_and_something_goes_round(
    held: int, whole: int, calls: int, sent: int, active: bool
) -> None:
    ring = left(ranks=2, traffic=left(calls=calls, bytes_sent=sent))
    run = left(notes={"context_parallel": left(own=held, whole=whole, ring=ring)})
    assert context_parallel.ContextParallel().active(run).active is active


class Slice:
    """A parameter of which a rank holds a part."""

    def __init__(self, here: int, whole: int) -> None:
        self.nbytes, self._here = whole, here
        self.device_mesh = left(size=lambda axis=None: 2)

    def to_local(self) -> Any:
        """Return the part."""
        return left(nbytes=self._here)


@pytest.mark.parametrize(
    ("here", "loose", "ranks", "active"),
    [(4, False, 2, True), (8, False, 2, False), (8, False, 1, True), (4, True, 2, False)],
)
def test_all_parameters_are_slices(
    monkeypatch: pytest.MonkeyPatch, here: int, loose: bool, ranks: int, active: bool
) -> None:
    monkeypatch.setattr("torch.distributed.tensor.DTensor", Slice)
    held: dict[str, Any] = {"a": Slice(here, 8), "b": torch.ones(1) if loose else Slice(here, 8)}
    model = left(parameters=held.values, named_parameters=held.items)
    sizes = {"slices": ranks, "replicate": 1}
    world = left(size=sizes.__getitem__, experts=None)
    run = left(model=model, notes={}, layouts={}, world=world)
    assert fsdp.Fsdp().active(run).active is active


@pytest.mark.parametrize(
    ("held", "messages", "actions", "active"),
    [(1, 3, 5, True), (2, 3, 5, False), (0, 3, 5, False), (1, 0, 5, False), (1, 3, 0, False)],
)
def test_a_stage_holds_a_part_runs_it_and_sends(
    held: int, messages: int, actions: int, active: bool
) -> None:
    line = left(messages=messages, rank=0, ranks=2, bytes=8)
    run = left(
        notes={"pipeline_parallel": left(line=line, actions=actions)},
        config=left(layers=2),
        model=left(blocks=range(held)),
    )
    assert pipeline_parallel.PipelineParallel().active(run).active is active


@pytest.mark.parametrize(
    ("rows", "whole", "calls", "compiled", "active"),
    [
        (4, 8, 3, [], True),
        (4, 8, 0, ["blocks"], True),
        (4, 8, 0, [], False),
        (3, 8, 3, [], False),  # not the part that is this rank's
        (4, 4, 3, [], False),
    ],
)
def test_a_rank_holds_its_own_part_and_meets_its_peers(
    rows: int, whole: int, calls: int, compiled: list[str], active: bool
) -> None:
    held = {"w": torch.ones(rows, 2)}
    cut = left(split={"tensor": 0}, shape=(whole, 2), offsets=lambda world: ((0, 0), (4, 2)))
    run = left(
        notes={"tensor_parallel": left(calls=calls)},
        world=left(),
        compiled=compiled,
        model=left(named_parameters=held.items),
        layouts={"w": cut},
    )
    assert tensor_parallel.TensorParallel().active(run).active is active


def test_a_teacher_that_read_nothing_taught_nothing() -> None:
    sums = torch.tensor([6.0, 3.0])
    run = left(model=left(head=1), notes={"distillation": left(sums=sums)})
    technique = distillation.Distillation()
    evidence = technique.active(run)
    assert evidence.active is True and evidence.numbers["divergence_nats"] == 2.0
    sums.zero_()
    assert technique.active(run).active is False


class Few:
    """Hold stored numbers."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes = nbytes

    def numel(self) -> int:
        """Return how many there are."""
        return 8


@pytest.mark.parametrize(
    ("reached", "weights", "active"),
    [
        (True, (Few(4), Few(4)), True),
        (False, (Few(4), Few(4)), False),
        (True, (Few(4), torch.ones(8)), False),
        (True, (Few(32), Few(32)), False),
    ],
)
def test_all_adapted_weights_are_stored_in_few_bits(
    monkeypatch: pytest.MonkeyPatch, reached: bool, weights: tuple[Any, ...], active: bool
) -> None:
    monkeypatch.setattr(qlora, "QuantizedWeight", Few)
    monkeypatch.setattr(adapted, "adapter_evidence", lambda *given: (reached, "", {}))
    modules = {
        f"blocks.{layer}.mlp.down": bare(LoraLinear, weight=weight)
        for layer, weight in enumerate(weights)
    }
    shape = left(tied_embeddings=False, layers=len(weights))
    run = left(model=left(named_modules=modules.items), optimizers={}, config=shape)
    assert qlora.Qlora().active(run).active is active


@pytest.mark.parametrize(
    ("now", "active"),
    [({"sequence_length": 8.0}, True), ({"sequence_length": 16.0}, False), ({}, False)],
)
def test_rows_of_this_steps_length_were_trained(now: dict[str, float], active: bool) -> None:
    run = left(notes={"sequence_length_schedule": {8: 3}}, now=now)
    assert SequenceLengthSchedule().active(run).active is active

"""Activation offload: the same bits, copies in the right order, less memory, hidden behind work.

On the host a stream that copies as late as it may stands in for a GPU's: what is not waited for is
not there, and memory that is given away before its copy ran is caught.
"""

import itertools
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from crosses import crossed
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.assemble.sockets import Build, Forward
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.compile.torch_compile import TorchCompile
from headrace.techniques.memory.activation_offload import ActivationOffload, HostTransfer, Offload
from headrace.train.train import step

Make = Callable[..., Build]
LAYERS = 4


class Late(HostTransfer):
    """A stream that copies nothing before somebody waits for it, and then in turn."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))
        self.queue: list[tuple[int, Any, Any]] = []
        self.log: list[Any] = []
        self.hosts: list[Tensor] = []
        self.issued = 0
        self.watch = lambda: None

    def buffer(self, count: int) -> Tensor:
        buffer = super().buffer(count)
        if all(buffer is not host for host in self.hosts):
            self.hosts.append(buffer)
        return buffer.fill_(77)

    def copy(self, target: Tensor, source: Tensor) -> int:
        self.issued += 1
        fetches = any(source is host for host in self.hosts)
        if fetches:
            target.fill_(255)  # not a number, as long as nobody waits
        self.log.append("fetch" if fetches else "send")
        self.queue.append((self.issued, weakref.ref(target), weakref.ref(source)))
        self.watch()
        return self.issued

    def wait(self, event: int) -> None:
        while self.queue and self.queue[0][0] <= event:
            _, target, source = self.queue.pop(0)
            assert target() is not None and source() is not None, "memory went before its copy ran"
            target().copy_(source())


def offload_of(
    build: Build, transfer: HostTransfer, *, keep_last: int = 1, min_bytes: int = 1
) -> Offload:
    """The hooks around the blocks of a build, as the technique puts them."""
    layers = [int(name) for name in build.model.blocks]
    sends = frozenset(layers[: len(layers) - keep_last])
    offload = Offload(
        transfer,
        min_bytes=min_bytes,
        sends=sends,
        last=layers[-1],
        step=lambda: build.now.get("step", 0.0),
    )
    build.wrap_blocks("offload", offload.wrap)
    return offload


def gradients(build: Build, index: int = 0) -> dict[str, Tensor]:
    step(build, build.loader.step(index).micros, index)
    return {n: p.grad.clone() for n, p in build.model.named_parameters() if p.grad is not None}


CASES = {
    "plain": (),
    "bf16": ("model.precision=bf16",),
    "accumulates": ("batch.micro_sequences=2",),
    "packed": ("techniques.document_packing={}", "batch.micro_sequences=4"),
    "recomputes": ("techniques.selective_checkpoint={every=2}",),
    "recomputes-more": ("techniques.selective_checkpoint.save=attention",),
    "grouped": ("model.kv_heads=1", "model.qk_norm=true", "model.norm=layer_norm"),
    "compiled": ("techniques.torch_compile={scope='block',backend='aot_eager'}",),
    "adapted": ("techniques.lora={rank=2}",),
}


@crossed(together=1, case=tuple(CASES), keep_last=(0, 1, 3))
def test_gradients_are_the_same_bits(make_tiny: Make, case: str, keep_last: int) -> None:
    keys = ("optimizer.clip_norm=0", f"model.layers={LAYERS}", *CASES[case])
    right = gradients(make_tiny(*keys))
    build, late = make_tiny(*keys), Late()
    offload = offload_of(build, late, keep_last=keep_last)
    found = gradients(build)
    assert found.keys() == right.keys() and right
    assert all(torch.equal(found[name], right[name]) for name in right)
    counts = offload.counts
    assert counts.sent_bytes == counts.fetched_bytes > 0 and not counts.never_left_bytes


def test_two_blocks_at_most_are_on_the_device_and_fetching_is_ahead(make_tiny: Make) -> None:
    build, late = make_tiny(f"model.layers={LAYERS}", "batch.micro_sequences=4"), Late()
    offload = offload_of(build, late)
    groups: dict[int, Any] = {}
    counted: list[int] = []
    enter = offload._enter

    def entered(layer: int, shared: Any) -> Any:
        groups[layer] = enter(layer, shared)
        return groups[layer]

    def told(forward: Forward, layer: int) -> Forward:
        def run(x: Tensor, shared: Any) -> Tensor:
            late.log.append(("forward", layer))
            y = forward(x, shared)
            y.register_hook(lambda gradient: late.log.append(("backward", layer)))
            return y

        return run

    def count() -> None:
        there = [g for g in groups.values() if any(p.device is not None for p in g.live_parts())]
        counted.append(len(there))

    offload._enter, late.watch = entered, count  # type: ignore[method-assign]
    build.wrap_blocks("told", told)
    gradients(build)
    there = list(range(LAYERS))
    wanted = [e for n in there[:-1] for e in (("forward", n), "send")] + [("forward", there[-1])]
    wanted += [e for n in there[:0:-1] for e in (("backward", n), "fetch")] + [("backward", 0)]
    assert [event for event, _ in itertools.groupby(late.log)] == 2 * wanted
    assert max(counted) == 2


def test_buffers_are_used_again_and_evaluation_sends_nothing(make_tiny: Make) -> None:
    build, late = make_tiny(f"model.layers={LAYERS}"), Late()
    offload = offload_of(build, late)
    gradients(build, 0)
    made, first = len(late.hosts), offload.counts
    gradients(build, 1)
    assert len(late.hosts) == made and offload.counts is not first
    assert offload.counts.sent_bytes == first.sent_bytes
    assert sum(map(len, late._free.values())) == made, "autograd has let go of every storage"
    issued = late.issued
    with torch.no_grad():
        work = [build.place(build, m) for m in build.loader.step(2).micros]
        build.engine(build, work, build.objective, torch.ones(()))
    assert late.issued == issued


def test_a_storage_is_sent_once_and_weights_never() -> None:
    late = Late()
    weight = nn.Parameter(torch.randn(8, 8))
    shared = (torch.randn(8, 8),)

    def forward(x: Tensor, shared: Any) -> Tensor:
        y = torch.nn.functional.linear(x, weight)
        half = torch.nn.functional.linear(x.bfloat16(), weight.bfloat16()).float()
        return (y * y.t() * shared[0] + half).view(-1).square().view(8, 8)

    offload = Offload(late, min_bytes=1, sends=frozenset({0}), last=0, step=lambda: 0.0)
    x = torch.randn(8, 8, requires_grad=True) + 0
    offload.wrap(forward, 0)(x, shared).sum().backward(retain_graph=True)
    square = 8 * 8 * 4
    # x, y with its transpose, what is squared, and the half of x; no weight and nothing shared
    assert (offload.counts.sent, offload.counts.sent_bytes) == (4, 3 * square + square // 2)
    small = Offload(late, min_bytes=square, sends=frozenset({0}), last=0, step=lambda: 0.0)
    small.wrap(forward, 0)(x, shared).sum().backward(retain_graph=True)
    assert (small.counts.sent, small.counts.sent_bytes) == (3, 3 * square)


def test_tensors_may_be_needed_twice(make_tiny: Make) -> None:
    build = make_tiny(f"model.layers={LAYERS}")
    offload_of(build, Late())
    (work,) = [build.place(build, m) for m in build.loader.step(0).micros]
    loss = build.model(
        work.ids_BT, work.targets_BT, work.rows, objective=build.objective, scale=torch.ones(())
    )
    weights = list(build.model.parameters())
    one = torch.autograd.grad(loss, weights, retain_graph=True)
    two = torch.autograd.grad(loss, weights)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


def test_refuses_a_host_a_whole_graph_and_nothing_to_send(make_tiny: Make) -> None:
    context = make_tiny("model.layers=2").context
    gpu = replace(context, device="cuda", capability=(9, 0))

    def asked(context: Any, technique: Any, *others: Any) -> str:
        named = {t.name(): t for t in (technique, *others)}
        plan = context.plan.model_copy(update={"techniques": named})
        answer = technique.supports(replace(context, plan=plan))
        return answer.remedy.text if isinstance(answer, Unsupported) else ""

    technique = ActivationOffload()
    assert isinstance(technique.supports(gpu), Supported)
    assert asked(context, technique) == "device=cuda"
    assert asked(gpu, technique, TorchCompile()) == "techniques.torch_compile.scope=block"
    assert not asked(gpu, technique, TorchCompile(scope="block"))
    remedy = asked(gpu, ActivationOffload(keep_last=2))
    assert remedy == "techniques.activation_offload.keep_last=1"


# --- on a GPU --------------------------------------------------------------------------------

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
LARGE = (
    "device=cuda",
    "model.layers=8",
    "model.dim=1024",
    "model.heads=8",
    "model.ffn=4096",
    "data.sequence_length=512",
    "batch.tokens=16384",
    "optimizer.clip_norm=0",
)
ON = "techniques.activation_offload.min_bytes=65536"
GPU_CASES = {**CASES, "compiled": ("techniques.torch_compile.scope=block",)}


@pytest.mark.gpu
@needs_gpu
@pytest.mark.parametrize("case", GPU_CASES)
def test_gradients_are_the_same_bits_on_a_gpu(make_tiny: Make, case: str) -> None:
    small = [k for k in LARGE if not k.startswith(("model.layers", "batch", "model.dim"))]
    keys = [*small, "model.layers=4", "model.dim=256", "batch.tokens=4096", *GPU_CASES[case]]
    with sdpa_kernel(SDPBackend.MATH):  # fused backward passes add up in any order
        right = gradients(make_tiny(*keys))
        build = make_tiny(*keys, "techniques.activation_offload.min_bytes=1")
        for index in range(3):  # buffers that were used before, too
            build.model.zero_grad()
            found = gradients(build, index)
            if index == 0:
                assert all(torch.equal(found[name], right[name]) for name in right)
            assert ActivationOffload(min_bytes=1).active(build).active


def peak_of(build: Build) -> int:
    """Bytes at the peak of a second step, above what the build holds."""
    gradients(build, 0)
    build.model.zero_grad(set_to_none=True)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    step(build, build.loader.step(1).micros, 1)
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


@pytest.mark.gpu
@needs_gpu
def test_peak_memory_falls_by_the_blocks_that_leave(make_tiny: Make) -> None:
    plain = make_tiny(*LARGE, "techniques.chunked_cross_entropy={}")
    without = peak_of(plain)
    del plain
    torch.cuda.empty_cache()
    build = make_tiny(*LARGE, "techniques.chunked_cross_entropy={}", ON)
    peak = peak_of(build)
    sent = build.notes["activation_offload"].counts.sent_bytes
    assert without - peak > 0.5 * sent, (without, peak, sent)


class Timed(HostTransfer):
    """Copies between two events that tell the time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.times: list[tuple[Any, Any]] = []

    def copy(self, target: Tensor, source: Tensor) -> Any:
        assert self.stream is not None
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.stream.wait_stream(torch.cuda.current_stream(self.device))
        begin.record(self.stream)
        super().copy(target, source)
        end.record(self.stream)
        self.times.append((begin, end))
        return end


@pytest.mark.gpu
@pytest.mark.alone
@needs_gpu
def test_copies_overlap_with_computation(make_tiny: Make) -> None:
    """Copies and computation together take much less than one after the other."""
    took, copied = [], 0.0
    for on in (False, True):
        build = make_tiny(*LARGE)
        timed = Timed(build.device)
        if on:
            offload_of(build, timed, min_bytes=65536)
        for index in range(2):  # page-locked memory is made in the first step
            gradients(build, index)
        timed.times.clear()
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        step(build, build.loader.step(2).micros, 2)
        end.record()
        torch.cuda.synchronize()
        took.append(begin.elapsed_time(end))
        copied = sum(a.elapsed_time(b) for a, b in timed.times)
        inside = [(begin.elapsed_time(a), begin.elapsed_time(b)) for a, b in timed.times]
        assert all(0 <= a <= b <= took[-1] + 1 for a, b in inside)
    hidden, most = took[0] + copied - took[1], min(took[0], copied)
    assert most > 0 and hidden > 0.5 * most, (took, copied)

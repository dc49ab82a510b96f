"""What each rank of the pipeline tests does: a toy in stages, against the same toy whole."""

import itertools
import os
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from headrace.parallel.pipeline import (
    Action,
    PipelineRank,
    forward_only,
    interleaved,
    one_forward_one_backward,
    run,
)
from headrace.parallel.zero_bubble import ORDERS

VOCAB, DIM, RANKS_PER_LINE = 11, 6, {2: (2,), 4: (4, 2)}

TOLERANCE = {"cpu": 1e-6, "cuda": 1e-5}


class Toy(nn.Module):
    """Stages of one matrix each; the first embeds, the last has a loss."""

    def __init__(self, stages: int, *, tied: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Parameter(torch.randn(VOCAB, DIM))
        self.head = self.embed if tied else nn.Parameter(torch.randn(VOCAB, DIM))
        self.layers = nn.ParameterList(torch.randn(DIM, DIM) / 2 for _ in range(stages))

    def stage(self, index: int, ids: Tensor, x: Tensor | None) -> Tensor:
        """Return states, or at the end the summed loss."""
        x = self.embed[ids] if x is None else x
        x = x + torch.tanh(x @ self.layers[index])
        if index < len(self.layers) - 1:
            return x
        return nn.functional.cross_entropy((x @ self.head.T).flatten(0, 1), ids.flatten() * 3 % 11)

    def auxiliary(self, index: int) -> Tensor | None:
        """Odd stages have one."""
        return self.layers[index].pow(2).sum() * 0.1 if index % 2 else None


class Part:
    """A part is one rank's stages of a toy."""

    dtype = torch.float32

    def __init__(
        self, toy: Toy, micros: Sequence[Tensor], line: PipelineRank, *, auxiliary: bool
    ) -> None:
        self.toy, self.micros, self.line, self.auxiliary = toy, micros, line, auxiliary
        self.lasts: list[tuple[int, bool]] = []
        self.waits = 0

    def shape(self, micro: int) -> tuple[int, ...]:
        return (*self.micros[micro].shape, DIM)

    def forward(self, chunk: int, micro: int, x: Tensor | None) -> tuple[Tensor, Tensor | None]:
        index = self.line.stage(chunk)
        output = self.toy.stage(index, self.micros[micro], x)
        return output, self.toy.auxiliary(index) if self.auxiliary else None

    def before_backward(self, chunk: int, last: bool) -> None:
        self.lasts.append((chunk, last))

    def waiting(self) -> None:
        self.waits += 1

    def weights(self) -> list[nn.Parameter]:
        return [p for p in self.toy.parameters() if p.requires_grad]


def whole(toy: Toy, micros: Sequence[Tensor], *, auxiliary: bool) -> Tensor:
    """Compute the reference: one process, one stage after the other."""
    total = torch.zeros((), device=toy.embed.device)
    for ids in micros:
        x: Tensor | None = None
        for index in range(len(toy.layers)):
            x = toy.stage(index, ids, x)
            more = toy.auxiliary(index) if auxiliary else None
            total = total if more is None else total + more
        assert x is not None
        total = total + x
    return total


def draw(count: int, line: PipelineRank) -> list[Tensor]:
    """Return micro-batches of different shapes."""
    source = torch.Generator().manual_seed(count)
    sizes = [(1 + m % 3, 4 + m % 2) for m in range(count)]
    return [torch.randint(VOCAB, s, generator=source).to(line.device) for s in sizes]


def toys(line: PipelineRank, *, tied: bool = False) -> tuple[Toy, Toy]:
    """Return two equal models, with a stage for each chunk of each rank."""
    one, two = (Toy(line.ranks * line.chunks, tied=tied).to(line.device) for _ in range(2))
    return one, two


ALONG_V: list[str] = []
"""The schedule of lines that lie along a V."""


def make_schedule(line: PipelineRank, micros: int) -> list[Action]:
    if line.v:
        return ORDERS[ALONG_V[-1]](line.ranks, line.rank, micros)
    if line.chunks == 1:
        return one_forward_one_backward(line.ranks, line.rank, micros)
    return interleaved(line.ranks, line.rank, micros, line.chunks)


def one_case(line: PipelineRank, micros: Sequence[Tensor], *, auxiliary: bool, tied: bool) -> None:
    """Loss and every gradient equal the whole model's; each chunk's last backward is told once."""
    reference, toy = toys(line, tied=tied)
    wanted = whole(reference, micros, auxiliary=auxiliary)
    wanted.backward()
    part = Part(toy, micros, line, auxiliary=auxiliary)
    loss = run(make_schedule(line, len(micros)), line, part)
    assert not loss.requires_grad
    dist.all_reduce(loss)
    loss /= dist.get_world_size() // line.ranks
    torch.testing.assert_close(loss, wanted.detach(), rtol=1e-6, atol=1e-6)
    mine = {line.stage(c) for c in range(line.chunks)}
    for index, layer in enumerate(toy.layers):
        assert (layer.grad is not None) == (index in mine)
    ends = []
    for found, right in zip(toy.parameters(), reference.parameters(), strict=True):
        gradient = torch.zeros_like(found) if found.grad is None else found.grad
        ends.append(bool(gradient.any()))
        dist.all_reduce(gradient)
        gradient /= dist.get_world_size() // line.ranks
        assert right.grad is not None
        limit = TOLERANCE[line.device.type] * float(right.grad.abs().max())
        torch.testing.assert_close(gradient, right.grad, rtol=0, atol=limit)
    if tied:
        assert ends[0] == (line.rank in (0, 0 if line.v else line.ranks - 1))
    told = [chunk for chunk, last in part.lasts if last]
    assert sorted(told) == list(range(line.chunks))
    for chunk in told:
        lasts = [last for c, last in part.lasts if c == chunk]
        assert lasts == [False] * (len(micros) - 1) + [True]


def evaluation(line: PipelineRank, micros: Sequence[Tensor]) -> None:
    """Only forwards; the number of micro-batches is free."""
    toy, _ = toys(line)
    with torch.no_grad():
        wanted = whole(toy, micros, auxiliary=True)
        part = Part(toy, micros, line, auxiliary=True)
        loss = run(forward_only(line.ranks, len(micros), line.chunks), line, part)
    dist.all_reduce(loss)
    loss /= dist.get_world_size() // line.ranks
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=1e-6)
    assert not part.lasts and all(p.grad is None for p in toy.parameters())


def frozen_start(line: PipelineRank, micros: Sequence[Tensor]) -> None:
    """A first stage that trains nothing has no graph; the messages stay in step."""
    reference, toy = toys(line)
    for model in (reference, toy):
        model.embed.requires_grad_(False)
        model.layers[0].requires_grad_(False)
    whole(reference, micros, auxiliary=False).backward()
    run(make_schedule(line, len(micros)), line, Part(toy, micros, line, auxiliary=False))
    for chunk in range(line.chunks):
        index = line.stage(chunk)
        found, right = toy.layers[index].grad, reference.layers[index].grad
        assert (found is None) == (right is None) == (index == 0)
        if found is not None:
            torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-6)


def counts(line: PipelineRank, micros: Sequence[Tensor]) -> None:
    """Every border is crossed once per micro-batch and direction, by [B, T, D] fp32."""
    line.messages = line.bytes = 0
    toy, _ = toys(line)
    run(make_schedule(line, len(micros)), line, Part(toy, micros, line, auxiliary=False))
    ends = line.rank in (0, line.ranks - 1)
    crossings = 2 * line.chunks - ((2 if line.v else 1) if ends else 0)
    assert line.messages == crossings * len(micros)
    assert line.bytes == crossings * sum(ids.numel() for ids in micros) * DIM * 4


def wrong_shape(line: PipelineRank) -> None:
    """A stage that does not keep to the agreed shape is an error where it happens."""
    toy, _ = toys(line)
    part = Part(toy, draw(line.ranks, line), line, auxiliary=False)
    part.dtype = torch.float16
    if line.rank == 0:
        try:
            run(make_schedule(line, line.ranks)[:1], line, part)
        except AssertionError as error:
            assert "activations" in str(error)
        else:
            raise AssertionError("a wrong dtype went out")
    dist.barrier()


def check(chunks: int, kind: str = "cpu", *, schedule: str = "") -> None:
    """Check every case of this world, in one process group; a schedule is one along a V."""
    v = bool(schedule)
    ALONG_V.append(schedule)
    device = torch.device(kind)
    if kind == "cuda":
        device = torch.device(kind, int(os.environ["LOCAL_RANK"]))
        torch.cuda.set_device(device)
    dist.init_process_group("gloo" if kind == "cpu" else "cpu:gloo,cuda:nccl")
    ranks = dist.get_world_size()
    for length in RANKS_PER_LINE[ranks]:
        grid = torch.arange(ranks).view(length, -1)
        line = PipelineRank(grid, device, chunks=chunks, v=v)
        amounts = [1, 2, 3, 5, 8] if chunks == 1 or v else [length, 2 * length, 3 * length]
        for amount, auxiliary in itertools.product(amounts, (False, True)):
            for tied in (False, True) if amount == amounts[1] else (auxiliary,):
                one_case(line, draw(amount, line), auxiliary=auxiliary, tied=tied)
        for amount in (0, 1, 3, 8):
            evaluation(line, draw(amount, line))
        frozen_start(line, draw(2 * length, line))
        counts(line, draw(2 * length, line))
        wrong_shape(line)
    dist.destroy_process_group()

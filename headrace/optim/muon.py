"""Update by Muon: every direction of a matrix's momentum gets the same length.

    m <- b m + (1 - b) g        d = b m + (1 - b) g   (Nesterov; else d = m)
    w <- w - lr (decay w + sqrt(max(1, rows / columns)) polar(d))

`polar` is the nearest semi-orthogonal matrix (kernels/orthogonalize). Source: Keller Jordan, "Muon"
(2024); arXiv 2502.16982. Matrices of one shape are one batch: their momenta are one tensor, of
which each parameter's state is a view, and momentum, polar and update are one function. On a GPU it
is compiled, once for each shape; learning rate, decay, momentum and mask are tensors, so nothing is
compiled again. A large batch is updated in chunks, so only one chunk's directions exist at a time.

Options: `rows` divides each row by the root of its running mean square and gives the matrix its
norm back (NorMuon, arXiv 2510.05491); `cautious` decays a weight only where update and decay have
one sign (arXiv 2510.12402); a `MatrixCut` takes fused matrices and heads apart. Over ranks each is
computed once (parallel/team). A step whose gradient is not finite is masked on the device.

With `fraction` < 1 a step updates a part of each matrix: the rows with the longest direction, or
the columns where the matrix is tall (optim/submatrix). The momentum of all others adds up until
they are taken (Dion2, arXiv 2512.16928):

    m <- m + (1 - b) g        w[taken] <- w[taken] - lr scale polar(d[taken])
    w <- w - lr decay w       m[taken] <- b m[taken]

`scale` is that of the whole matrix. Dion2 adds g, not (1 - b) g: the polar factor is the same, as
it has no length, and here m keeps the scale that it has at `fraction` = 1. In Dion2 d is m, as
without Nesterov here.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any

import torch
from torch import Tensor, nn

from headrace.kernels.orthogonalize import Name, iterated_dtype, orthogonalize
from headrace.optim.compiled import CompiledUpdates
from headrace.optim.submatrix import IDLE, Submatrix, count_touched, longest
from headrace.parallel.layout import as_parameter, is_dtensor, local_of
from headrace.parallel.team import Team, stagger

CHUNK_NUMBERS = 1 << 26
"""Numbers of the matrices that are updated at once, 256 MiB in fp32: two of [16384, 2048]."""
CHUNK_MATRICES = 64
"""Most matrices that are updated at once: each is an argument of the compiled function."""
ROW_MEMORY = 0.95
"""Share of the old mean square of a row that is kept (arXiv 2510.05491)."""
ROW_EPS = 1e-8
"""Added to the root of a row's mean square (arXiv 2510.05491)."""


@dataclass(frozen=True)
class MatrixCut:
    """Take fused matrices apart: rows are `groups` of runs, each of which alternates pieces.

    Args:
        groups: how often the pattern of rows repeats.
        runs: (pieces, rows of one in a group, matrices that a piece is cut into) of each run.
    """

    groups: int
    runs: tuple[tuple[int, int, int], ...]

    @property
    def pieces(self) -> int:
        """Return how many matrices one is taken apart into."""
        return sum(count * blocks for count, _, blocks in self.runs) or 1

    def shapes(self, height: int, columns: int) -> list[tuple[int, int, int]]:
        """Return (pieces, rows, columns) of each kind of piece of one matrix."""
        if not self.runs:
            return [(1, height, columns)]
        runs = self.runs
        return [(n * blocks, self.groups * rows // blocks, columns) for n, rows, blocks in runs]

    def apart(self, batch: Tensor) -> list[Tensor]:
        """Return the pieces of a batch [matrices, rows, columns], a batch for each run."""
        grouped, batches, first = batch.unflatten(1, (self.groups, -1)), [], 0
        for pieces, rows, blocks in self.runs:
            run = grouped.narrow(2, first, pieces * rows).unflatten(2, (pieces, rows))
            height = self.groups * rows // blocks
            batches.append(run.transpose(1, 2).reshape(-1, height, batch.size(-1)))
            first += pieces * rows
        return batches

    def together(self, batches: Sequence[Tensor], count: int) -> Tensor:
        """Return `count` matrices of their pieces: the inverse of `apart`."""
        runs = [
            batch.reshape(count, pieces, self.groups, rows, -1).transpose(1, 2).flatten(2, 3)
            for batch, (pieces, rows, _) in zip(batches, self.runs, strict=True)
        ]
        return (runs[0] if len(runs) == 1 else torch.cat(runs, 2)).flatten(1, 2)


WHOLE = MatrixCut(1, ())
"""How a matrix that is one piece is taken apart."""


@dataclass(frozen=True)
class MuonRule:
    """Hold what an update does, as far as a compiled function has it built in.

    Args:
        name: which polynomials.
        nesterov: look ahead.
        cautious: decay a weight only where update and decay have one sign.
        rows: give rows even lengths.
        symmetric: compute half of a symmetric matmul.
        fraction: share of the rows, or columns of a tall matrix, that a step updates.
    """

    name: Name = "polar_express"
    nesterov: bool = True
    cautious: bool = False
    rows: bool = False
    symmetric: bool = False
    fraction: float = 1.0


@dataclass
class Scalars:
    """Hold the numbers of a step on the device, each a tensor without dimensions.

    Args:
        lr: length of an update; 0 where the step is masked.
        shrink: share of a weight that decays; 0 where the step is masked.
        momentum: share of the old momentum that is kept.
        keep: 0 where the step is masked, else 1.
        feedback: what the momentum of updated rows is multiplied by after the update, 1 where the
            step is masked; None where a step updates all rows.
    """

    lr: Tensor
    shrink: Tensor
    momentum: Tensor
    keep: Tensor
    feedback: Tensor | None


def direction_(
    gradients: Sequence[Tensor], kept: Tensor, momentum: Tensor, keep: Tensor, rule: MuonRule
) -> Tensor:
    """Update the momenta and return the directions, [matrices, rows, columns]."""
    stacked = torch.stack(list(gradients))
    stacked.masked_fill_(keep == 0, 0.0)  # nothing times nan is nan
    if rule.fraction < 1:
        kept.addcmul_(stacked, (1 - momentum) * keep)
    else:
        kept.lerp_(stacked, (1 - momentum) * keep)
    return stacked.lerp_(kept, momentum) if rule.nesterov else kept


def polar_(
    directions: Tensor,
    rows: Tensor | None,
    keep: Tensor,
    touched: Tensor | None,
    rule: MuonRule,
    cut: MatrixCut,
) -> Tensor:
    """Return the updates of whole matrices, [matrices, rows, columns], in the iteration's dtype.

    They are IDLE where the rule leaves the weights alone.

    Args:
        directions: [matrices, rows, columns].
        rows: running mean squares [matrices, rows], which are updated; None without them.
        keep: 0 where the step is masked.
        touched: the count of updated rows is added to it; None where all are.
        rule: what is done.
        cut: how the matrices are taken apart.
    """
    if not cut.runs:
        cut = MatrixCut(1, ((1, directions.size(1), 1),))
    orthogonal = [_orthogonal(piece, rule) for piece in cut.apart(directions)]
    parts, batches = [part for part, _ in orthogonal], [batch for _, batch in orthogonal]
    del orthogonal
    if rows is not None:
        squares, taken = cut.apart(rows.unsqueeze(-1)), [part.of_rows() for part in parts]
        both = [
            _normalized(b, t.of(s), keep) for b, t, s in zip(batches, taken, squares, strict=True)
        ]
        batches = [batch for batch, _ in both]
        squares = [t.into(s, new) for t, s, (_, new) in zip(taken, squares, both, strict=True)]
        rows.copy_(cut.together(squares, len(rows)).squeeze(-1))
    batches = [part.alone(batch) for part, batch in zip(parts, batches, strict=True)]
    if touched is not None:
        for batch in batches:
            touched.add_(count_touched(batch))
    return cut.together(batches, len(directions))


def _orthogonal(piece: Tensor, rule: MuonRule) -> tuple[Submatrix, Tensor]:
    """Return what the rule takes of a batch, and that orthogonalised and scaled."""
    part = longest(piece, rule.fraction, iterated_dtype(piece))
    batch = orthogonalize(part.of(piece), rule.name, symmetric=rule.symmetric)
    return part, _long(batch, *piece.shape[1:])


def _long(batch: Tensor, rows: int, columns: int) -> Tensor:
    """Make updates longer where matrices are tall, so that a row is as long as in others."""
    return batch if rows <= columns else batch.mul_((rows / columns) ** 0.5)


def _normalized(batch: Tensor, squares: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
    """Return matrices with rows of even length and their old norm, and the new mean squares."""
    now = batch.float().square().mean(-1, keepdim=True)
    squares = squares.lerp(now, (1 - ROW_MEMORY) * keep)
    factor = 1.0 / (squares.sqrt() + ROW_EPS)
    whole = (now * factor.square()).sum(1, keepdim=True).clamp_min(1e-30)
    factor = factor * (now.sum(1, keepdim=True) / whole).sqrt()
    return (batch * factor).to(batch.dtype), squares


def change_(
    weights: Sequence[Tensor],
    updates: Tensor,
    kept: Tensor,
    lr: Tensor,
    shrink: Tensor | None,
    feedback: Tensor | None,
    rule: MuonRule,
) -> None:
    """Subtract the updates [matrices, rows, columns], and the decay where `shrink` is given.

    Where `feedback` is given, the momenta of what is updated are multiplied by it.
    """
    if feedback is not None:
        idle = updates == IDLE
        kept.mul_(torch.where(idle, 1.0, feedback))
        updates.masked_fill_(idle, 0.0)

    def changed(weight: Tensor, update: Tensor) -> Tensor:
        step = lr * update.float()
        if shrink is None:
            return step
        decay = shrink * weight
        if not rule.cautious:
            return step + decay
        sign = update * weight
        return step + torch.where(sign >= 0 if feedback is None else sign > 0, decay, 0.0)

    steps = [changed(w, u) for w, u in zip(weights, updates.unbind(0), strict=True)]
    torch._foreach_sub_(list(weights), steps)  # type: ignore[attr-defined]


def update_(
    weights: Sequence[Tensor],
    gradients: Sequence[Tensor],
    kept: Tensor,
    rows: Tensor | None,
    lr: Tensor,
    shrink: Tensor | None,
    momentum: Tensor,
    keep: Tensor,
    feedback: Tensor | None,
    touched: Tensor | None,
    rule: MuonRule,
    cut: MatrixCut,
) -> None:
    """Update whole matrices of one shape, their momenta and their rows' mean squares."""
    updates = polar_(
        direction_(gradients, kept, momentum, keep, rule), rows, keep, touched, rule, cut
    )  # the directions are let go of before the weights change
    change_(weights, updates, kept, lr, shrink, feedback, rule)


class MatrixBatch:
    """Hold parameters of one shape that lie on the ranks in one way, and their states.

    Args:
        parameters: all of them.
        cut: how each is taken apart.
        rows: how many rows the whole has, where their mean squares are kept; else 0.
        state: the optimizer's, by parameter; every state is a view of this batch's.
        team: the ranks that share the work; None where one process has all of it.
    """

    def __init__(
        self,
        parameters: list[nn.Parameter],
        cut: MatrixCut,
        rows: int,
        state: Any,
        team: Team | None,
    ) -> None:
        self.parameters, self.cut, self.team, self._state = parameters, cut, team, state
        self._rows, self.rows = rows, None
        self.momentum: Tensor | None = None
        self._views: list[dict[str, Tensor]] = []

    def chunks(self) -> Iterator[slice]:
        """Yield which parameters are updated at once: all of a chunk have gradients."""
        numbers = max(1, self.parameters[0].numel())
        ranks = self.team.ranks if self.team else 1
        most = min(CHUNK_MATRICES, max(ranks, CHUNK_NUMBERS // numbers))
        runs = groupby(range(len(self.parameters)), lambda i: self.parameters[i].grad is not None)
        for ready, indices in runs:
            places = list(indices) if ready else []
            for first in range(0, len(places), most):
                part = places[first : first + most]
                yield slice(part[0], part[-1] + 1)

    def take_states(self) -> None:
        """Make the states at the first step, and take those that a checkpoint brought.

        What it brought and the rule has no use for, as mean squares of rows, is dropped.
        """
        if self.momentum is None:
            local = local_of(self.parameters[0])
            count = len(self.parameters)
            self.momentum = local.new_zeros((count, *local.shape), dtype=torch.float32)
            if self._rows:
                self.rows = self.momentum.new_zeros((count, self._rows))
            for index, parameter in enumerate(self.parameters):
                views = {"momentum": as_parameter(parameter, self.momentum[index])}
                if self.rows is not None:
                    views["rows"] = self.rows[index]
                self._views.append(views)
        for parameter, views in zip(self.parameters, self._views, strict=True):
            state = self._state[parameter]
            for key in state.keys() - views.keys():
                del state[key]
            for key, view in views.items():
                given = state.get(key)
                if given is not view:
                    if given is None:  # it never was, or a rewind removed it
                        local_of(view).zero_()
                    else:
                        local_of(view).copy_(local_of(given))
                    state[key] = view


class MuonOptimizer(torch.optim.Optimizer):
    """Run Muon over named matrices, masked by `found_inf` on the device."""

    def __init__(
        self,
        named: Mapping[str, nn.Parameter],
        cuts: Mapping[str, MatrixCut],
        *,
        lr: float,
        momentum: float,
        weight_decay: float,
        rule: MuonRule = MuonRule(),
        now: Callable[[], float | None] = lambda: None,
        team: Callable[[str], Team | None] = lambda name: None,
        compiled: bool = False,
    ) -> None:
        """Take every matrix of `named`.

        Args:
            named: matrices by name.
            cuts: which of them hold several pieces, by the end of their name.
            lr: length of an update.
            momentum: share of the old momentum that is kept.
            weight_decay: decoupled.
            rule: what an update does beyond that.
            now: returns the momentum of the step that runs; None where it does not vary.
            team: name -> the ranks that share the work on it; None where one process has all.
            compiled: compile the update, once for each shape.
        """
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__(list(named.values()), defaults)
        self.found_inf: Tensor | None = None
        self.orthogonalized = 0
        self.sides: Counter[int] = Counter()
        """rows, or columns of a tall one, -> whole matrices with as many that this rank took some
        of"""
        self.touched: Tensor | None = None
        """how many of them were updated; None where all are"""
        self.momentum: float | None = None
        """the last step's"""
        self.rule, self.compiled = rule, compiled
        self.graphs = CompiledUpdates("muon")
        self._now = now
        self._names = {p: n for n, p in named.items()}
        self._batches: list[list[MatrixBatch]] = []
        for group in self.param_groups:
            alike: dict[Any, list[nn.Parameter]] = {}
            for p in group["params"]:
                cut = cut_of(self._names[p], cuts)
                alike.setdefault((cut, *_lies(p, team(self._names[p]))), []).append(p)
            self._batches.append(
                [self._batch(members, key[0], team) for key, members in alike.items()]
            )

    def _batch(
        self, alike: list[nn.Parameter], cut: MatrixCut, team: Callable[[str], Team | None]
    ) -> MatrixBatch:
        ranks = team(self._names[alike[0]])
        rows = (ranks.layout.shape[0] if ranks else alike[0].size(0)) if self.rule.rows else 0
        return MatrixBatch(alike, cut, rows, self.state, ranks)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        """Update every matrix; where `found_inf` is 1, matrices and states stay as they are."""
        now = self._now()
        for group, batches in zip(self.param_groups, self._batches, strict=True):
            device = group["params"][0].device
            number = partial(torch.full, (), device=device)
            bad = number(0.0) if self.found_inf is None else self.found_inf
            keep = 1.0 - bad.float()
            self.momentum = float(group["momentum"] if now is None else now)
            momentum, feedback = number(self.momentum), None
            if self.rule.fraction < 1:
                feedback = torch.where(keep == 0, 1.0, momentum)
                if self.touched is None:
                    self.touched = number(0, dtype=torch.int64)
            scalars = Scalars(
                number(float(group["lr"])) * keep,
                number(float(group["lr"]) * group["weight_decay"]) * keep,
                momentum,
                keep,
                feedback,
            )
            decays = group["weight_decay"] != 0
            stagger(
                self._update(batch, chunk, scalars, decays)
                for batch in batches
                for chunk in batch.chunks()
            )

    def _update(
        self, batch: MatrixBatch, chunk: slice, scalars: Scalars, decays: bool
    ) -> Iterator[None]:
        """Update the parameters of a chunk, on the ranks of its team.

        Yields where what ranks send each other is under way.
        """
        batch.take_states()
        assert batch.momentum is not None
        taken = batch.parameters[chunk]
        weights = [local_of(p).detach() for p in taken]
        gradients = [local_of(p.grad) for p in taken]  # type: ignore[arg-type]
        kept = batch.momentum[chunk]
        rows = None if batch.rows is None else batch.rows[chunk]
        shrink = scalars.shrink if decays else None
        cut, rule, team, keep = batch.cut, self.rule, batch.team, scalars.keep
        self.orthogonalized += cut.pieces * len(taken)
        if team is None:
            self._count_rows(len(taken), taken[0].shape, cut)
            states = kept, rows, scalars.lr, shrink, scalars.momentum, keep
            how = scalars.feedback, self.touched, rule, cut
            self._run(update_, weights, gradients, *states, *how)
            return
        directions = self._run(direction_, gradients, kept, scalars.momentum, keep, rule)
        if directions.is_cuda:
            directions = directions.bfloat16()  # the iteration's dtype: half of the traffic
        arriving, mine = team.whole(directions), team.mine(len(taken))
        del directions
        if team.travels:
            yield
        whole = arriving()
        del arriving  # and what it holds
        own = None if rows is None else rows[mine]
        updates = whole
        if len(whole):
            self._count_rows(len(whole), whole.shape[1:], cut)
            updates = self._run(polar_, whole, own, keep, self.touched, rule, cut)
        if rows is not None and own is not None:
            rows.copy_(team.everyones(own, len(taken)))
        returning = team.parts(updates, len(taken))
        del whole, updates
        if team.travels:
            yield
        parts = returning()
        del returning
        self._run(change_, weights, parts, kept, scalars.lr, shrink, scalars.feedback, rule)

    def _count_rows(self, count: int, shape: Sequence[int], cut: MatrixCut) -> None:
        """Count the rows of so many whole matrices, where a step takes some of them."""
        if self.rule.fraction < 1:
            for pieces, *sides in cut.shapes(shape[0], shape[1]):
                self.sides[min(sides)] += count * pieces

    def _run(self, function: Any, *given: Any) -> Any:
        """Call a function, compiled for the shapes that it is given where that is asked for."""
        return self.graphs.call(function, given) if self.compiled else function(*given)


def cut_of(name: str, cuts: Mapping[str, MatrixCut]) -> MatrixCut:
    """Return how a parameter is taken apart."""
    name = name.removesuffix(".weight")
    return next((cut for end, cut in cuts.items() if name.endswith(end)), WHOLE)


def _lies(p: nn.Parameter, team: Team | None) -> tuple[Any, ...]:
    """Return what parameters of one batch have in common."""
    if team is None:
        return p.shape, p.dtype, p.device
    split = tuple(team.layout.split.items())
    return tuple(team.layout.shape), p.shape, p.dtype, p.device, is_dtensor(p), split

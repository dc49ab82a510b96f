"""Count how much of each source a run reads: tokens, share and epochs, by source and by stage.

Rows are counted as they are dealt, without reading any. Where sources are mixed by size, an epoch
has every row of every source once, so that only the last, partial one is counted row by row; where
that is long, its part of each source is taken to be the source's part of all rows.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from headrace.core.units import format_count
from headrace.data.mixture import borders, mixture_of, run_rows
from headrace.data.order import MixtureOrder, UniformOrder
from headrace.plan.plan import Plan

REPEATED_OFTEN = 4
"""Epochs of a source up to which its tokens are worth nearly as much as fresh ones (Muennighoff et
al., arXiv 2305.16264, section 6)."""
COUNTED_ROWS = 1 << 18
"""Rows of a partial epoch by size that are counted one by one, which takes about 0.1 s."""


@dataclass(frozen=True)
class SourceShare:
    """Hold what one source gives in one stage, or in the whole run.

    Args:
        source: its name.
        stage: number of the stage; None is the whole run.
        rows: rows of it.
        tokens: tokens of them.
        share: of the tokens of that stage, or of the run.
        epochs: how often its rows are read through there.
        source_tokens: the tokens of one time through.
    """

    source: str
    stage: int | None
    rows: int
    tokens: int
    share: float
    epochs: float
    source_tokens: int


@dataclass(frozen=True)
class MixCount:
    """Hold how much of each source a run reads.

    Args:
        tokens: of the run.
        exact: whether every row is counted as it is dealt.
        sources: what each source gives to the whole run.
        stages: what each gives to each stage.
        begins: the first token of each stage.
    """

    tokens: int
    exact: bool
    sources: tuple[SourceShare, ...]
    stages: tuple[SourceShare, ...]
    begins: tuple[int, ...]

    @property
    def repeated(self) -> tuple[SourceShare, ...]:
        """Return the sources that are read more than `REPEATED_OFTEN` times."""
        return tuple(one for one in self.sources if one.epochs > REPEATED_OFTEN)

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {
            "tokens": self.tokens,
            "exact": self.exact,
            "stage_begins_tokens": list(self.begins),
            "sources": [asdict(one) for one in self.sources],
            "stages": [asdict(one) for one in self.stages],
            "repeated_often": [one.source for one in self.repeated],
        }

    def lines(self) -> Iterator[str]:
        """Yield what is told before a run begins: epochs of each source, and which are too many."""
        each = (f"{one.source} {one.epochs:.2f} epochs ({one.share:.1%})" for one in self.sources)
        yield f"mixture of {format_count(self.tokens)} tokens: {', '.join(each)}"
        for one in self.repeated:
            yield repetition(one)


def repetition(one: SourceShare) -> str:
    """Return the warning about a source that is read too often."""
    return (
        f"{one.source} is read {one.epochs:.1f} times: beyond {REPEATED_OFTEN} epochs repeated "
        "tokens lose their worth (arXiv 2305.16264); try: more text, a shorter goal, or "
        f"data.mixture.max_epochs={REPEATED_OFTEN} beside a source without limit"
    )


def count_mix(
    plan: Plan, tokens: Sequence[int], units: Sequence[int], rows: int | None = None
) -> MixCount | None:
    """Return how much of each source a run reads; None where nothing says how long it is.

    It is None too where a curriculum orders the rows of all sources together: then scores decide.

    Args:
        plan: the run's plan.
        tokens: of each source.
        units: rows of each source, as the run's packer makes them.
        rows: rows that were read; those to the plan's end without it.

    Raises:
        ConfigError: as `mixture_of` raises it.
    """
    mixture = mixture_of(plan, tokens, units)
    if mixture is None and plan.data.curriculum is not None and len(units) > 1:
        return None
    if rows is None and (rows := run_rows(plan)) is None:
        return None
    begins = [min(begin, rows) for begin in borders(plan)]
    exact = True
    if mixture is None:
        epochs, rest = divmod(rows, sum(units))
        exact = rest <= COUNTED_ROWS
        whole = np.array(units) * epochs + _partial(plan, units, rows - rest, rest)
        dealt = [np.zeros(len(units), dtype=np.int64), whole]
    else:
        order = MixtureOrder(units, mixture, seed=plan.seed)
        dealt = [order.counts(row) for row in (*begins, rows)]
    names, length = plan.source_list, plan.data.sequence_length

    def shares(stage: int | None, counts: np.ndarray) -> tuple[SourceShare, ...]:
        total = max(1, int(counts.sum()))
        return tuple(
            SourceShare(
                source=name,
                stage=stage,
                rows=int(count),
                tokens=int(count) * length,
                share=int(count) / total,
                epochs=int(count) / unit,
                source_tokens=unit * length,
            )
            for name, count, unit in zip(names, counts, units, strict=True)
        )

    parts = [shares(n, dealt[n + 1] - dealt[n]) for n in range(len(begins))]
    return MixCount(
        tokens=rows * length,
        exact=exact,
        sources=shares(None, dealt[-1]),
        stages=tuple(one for part in parts for one in part),
        begins=tuple(begin * length for begin in begins),
    )


def _partial(plan: Plan, units: Sequence[int], first: int, rest: int) -> np.ndarray:
    """Return the rows of each source in the last, partial epoch of sources by size [sources]."""
    if rest <= COUNTED_ROWS:
        source, _ = UniformOrder(units, seed=plan.seed)(first, rest)
        return np.bincount(source, minlength=len(units))
    ends = [rest * end // sum(units) for end in np.cumsum(units).tolist()]
    return np.diff(ends, prepend=0)

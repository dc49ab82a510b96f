"""Say which row comes next: the baseline's filler of the socket `order`."""

from math import ceil

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.data.mixture import Mixture, mixture_of, run_rows
from headrace.data.order import Order, make_order
from headrace.data.paced_order import PacedOrder
from headrace.data.rows import Packer, Weighing
from headrace.data.scored import open_shares, with_scores


def order_rows(build: Build, packer: Packer) -> Order:
    """Return the baseline's order by the plan's mixture and its curriculum.

    It is a keyed permutation, or one whose easy rows come first.

    Raises:
        ConfigError: see `mixture_of`; or the plan has a curriculum, and the packer does not say
            what its rows hold, or a source may not be read as often as that repeats its rows.
    """
    tokens = [shards.tokens for shards in build.prepared.train]
    mixture = mixture_of(build.plan, tokens, packer.units)
    if build.plan.data.curriculum is None:
        return make_order(packer.units, seed=build.plan.seed, mixture=mixture)
    return _paced(build, packer, mixture)


def _paced(build: Build, packer: Packer, mixture: Mixture | None) -> PacedOrder:
    """Return the order whose easy rows come first."""
    plan = build.plan
    curriculum = plan.data.curriculum
    assert curriculum is not None
    if build.prepared.scores is None:  # it was prepared for another plan of the same text
        build.prepared = with_scores(plan, build.prepared)
    assert build.prepared.scores is not None
    if not isinstance(packer, Weighing):
        names = build.filled.get("pack", [type(packer).__name__])
        raise ConfigError(
            f"data.curriculum orders rows by their documents' scores, and {names[0]} does not say "
            "which documents its rows hold",
            mend(f"-{names[0]}"),
        )
    shares = open_shares(plan)
    rows = run_rows(plan) or shares[-1][0]
    order = PacedOrder(
        [
            packer.means(source, values)
            for source, values in enumerate(build.prepared.scores.values)
        ],
        shares,
        seed=plan.seed,
        mixture=mixture,
        hard_first=curriculum.first == "hard",
        strict=curriculum.pacing == "sorted",
        run_rows=rows,
    )
    _check_epochs(build, order, rows)
    return order


def _check_epochs(build: Build, order: PacedOrder, rows: int) -> None:
    """Refuse a curriculum that reads a row more often than the mixture allows its source.

    Raises:
        ConfigError: it does, since it reads the open rows again before the others.
    """
    plan = build.plan
    if (mixture := plan.data.mixture) is None:
        return
    for source, name in enumerate(plan.source_list):
        most, passes = mixture.epochs_of(source), order.passes_of(source, rows)
        if most and passes > max(1, ceil(most)):
            raise ConfigError(
                f"data.mixture.max_epochs lets {name} be read {most:g} times, and data.curriculum "
                f"reads the rows that are open first {passes:,} times in the run's {rows:,}",
                mend("data.mixture.max_epochs=0"),
            )

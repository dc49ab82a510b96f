"""Compare the time of the best plans with measured ceilings, and name the gaps that are left.

Rows of `kernel_table.py` hold milliseconds by family of kernels. The plan's ledger counts the work:
FLOPs of matmuls and attention, bytes of the update and of everything else that streams. A ceiling
is what one kernel reaches alone, as headrace/costs/assumed.py has it of the device: matmuls at
8,192 cubed in each precision, a copy of gigabytes, attention of the plan's own kernel at the plan's
own shape. (Its 795 TFLOP/s in bf16 were probed after the 774 in LOG.md, and are stricter.) What a
family takes above its work at the ceiling is lost to it; of a family without work, that is all.

Of the rows that have idle times, the fastest stands for its shape, precision and device. A row has
its plan's work. An older row has not, and its command makes the plan again. That plan counts when
its fingerprint is the row's; otherwise the page says so, and nothing is computed.
"""

import argparse
import math
import shlex
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import receipts
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.costs.machine import ANCHOR_MATMUL, Machine
from headrace.costs.rates import BACKWARD
from headrace.costs.work import (
    SKIPPING,
    TORCHS,
    Attention,
    Collective,
    HostCopy,
    Matmul,
    Stream,
    Work,
)
from headrace.plan.plan import Plan
from headrace.plan.technique import Context

PLANS = Path(__file__).parent / "plans"
SINCE = (
    ("trace",),
    ("model", "logit_cap"),
    ("data", "lossy_tokenizer"),
    ("model", "embedding_norm"),
    ("model", "embedding_residual"),
    ("model", "value_embeddings"),
    ("model", "matrix_init"),
    ("model", "head_init"),
    ("schedule", "decay_shape"),
    ("optimizer", "lr_factors"),
    ("optimizer", "decay_factors"),
    ("data", "text_template"),
    ("data", "separator"),
    ("data", "invalid_utf8"),
    ("data", "decontamination"),
    ("data", "tokenizer_pattern"),
    ("data", "tokenizer_text"),
    ("data", "special_tokens"),
    ("data", "special_from_text"),
    ("eval", "before"),
    ("model", "adapter"),
    ("model", "rope_scaling"),
    ("model", "local_rope_theta"),
    ("model", "window"),
    ("model", "window_between"),
    ("model", "attention_cap"),
    ("model", "query_scale"),
    ("model", "embedding_scale"),
    ("model", "post_norms"),
    ("model", "qkv_bias"),
    ("mesh", "auto"),
    ("eval", "general"),
    ("mesh", "replicate"),
    ("mesh", "patience_s"),
    ("mesh", "compare_every_steps"),
    ("mesh", "expert"),
    ("checkpoint", "memory_every_steps"),
    ("model", "bigram_multiple"),
    ("model", "embedding_smear"),
    ("hardware", "restart_minutes"),
)
"""Keys that plans got after rows had been written, the newest last. An older fingerprint is without
them, and at their defaults they change no kernel."""
EARLIER = {"matrix_products": "products", "triton": "elementwise", "rest": "other"}
"""Families of rows before commit 09386a9 -> their names since. The rest then had reductions, of the
gradients' norm too, that are elementwise now; attention had small kernels that are the rest now."""
NO_FAMILIES = ("step", "over_link", "beside_kernels")
"""Metrics of a row that are no time of a family."""
NORM = "clip/optimizer"
"""The ledger's name of the gradient norm, which is reductions and no kernel of the update."""
STREAMS = {"elementwise": "streams", "optimizer": "update", "copies": "host link"}
PRECISIONS = ("bf16", "fp8")
"""Fields of a plan that change the matmuls which a row may stand for."""
LABELS = {"other": "the rest"}
HEADS = ("family", "ms", "of the step", "work", "rate", "ceiling", "of the ceiling", "lost, ms")
UNITS = {"flops": ("TFLOP", 1e12), "bytes": ("GB", 1e9)}
RATES = {"flops": "TFLOP/s", "bytes": "TB/s"}


# --- work ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Piece:
    """Hold the work that one step gives a family of kernels.

    Args:
        family: as the kernels' names show it.
        what: precision of matmuls, kernel of attention, "streams", "norm", "update", "host link".
        flops, bytes: of a step, over all micro-batches.
        sizes: of attention rows, heads, key-value heads, length, features.
        causal, backward: of attention.
        unknown: why the work is unavailable, if it is.
    """

    family: str
    what: str = ""
    flops: float = 0.0
    bytes: float = 0.0
    sizes: tuple[int, ...] = ()
    causal: bool = True
    backward: bool = False
    unknown: str = ""

    def plain(self) -> dict[str, Any]:
        """Return the piece as a row stores it."""
        return {key: value for key, value in vars(self).items() if value != getattr(Piece, key, "")}

    @classmethod
    def read(cls, values: dict[str, Any]) -> "Piece":
        """Read a piece that `to_dict` made, through JSON."""
        return cls(**{**values, "sizes": tuple(values.get("sizes", ()))})

    def ceiling_s(self, machine: Machine) -> float:
        """Return seconds at the highest measured rates.

        Raises:
            UnsupportedError: the machine has none for it.
        """
        if self.family == "products":
            m, n, k = ANCHOR_MATMUL
            return self.flops / (2 * m * n * k) * machine.matmul_s(self.what, m, n, k)
        if self.family != "attention":
            link = self.family == "copies"
            return self.bytes / (machine.to_host if link else machine.traffic).bytes_per_s
        kernel = self.what or next(k for k in TORCHS if k in machine.kernels(self.backward))
        rows, heads, kv_heads, length, features = self.sizes
        one_s = machine.attention_s(
            SKIPPING.get(kernel, kernel),
            rows=rows,
            heads=heads,
            kv_heads=kv_heads,
            length=length,
            features=features,
            causal=self.causal,
            backward=self.backward,
        )
        return self.flops / scores_flops(self.sizes, self.causal, self.backward) * one_s


def scores_flops(sizes: Sequence[int], causal: bool, backward: bool) -> float:
    """Return the FLOPs of one attention kernel; a causal one counts half of all pairs."""
    rows, heads, _, length, features = sizes
    return (2 if causal else 4) * rows * heads * length**2 * features * (BACKWARD**backward)


def work_of(plan: Plan, context: Context) -> list[Piece]:
    """Return the work that the ledger of a plan counts for each family in a step.

    Raises:
        UnsupportedError: a technique of the plan states no work.
    """
    silent = [name for name, technique in plan.techniques.items() if not technique.timed]
    if silent:
        raise UnsupportedError(f"{', '.join(silent)} does not say what it does to a step", "")
    ledger = make_ledger(plan, context)
    summed: dict[Piece, Piece] = {}
    for name, work in ledger.work.items():
        times = work.count * (1 if work.phase == "optimizer" else ledger.sizes["micro_batches"])
        if times:
            one = _piece(name, work)
            key = replace(one, flops=0.0, bytes=0.0)
            had = summed.get(key, key)
            summed[key] = replace(
                key, flops=had.flops + times * one.flops, bytes=had.bytes + times * one.bytes
            )
    return list(summed.values())


def _piece(name: str, work: Work) -> Piece:
    """Return the piece of one kernel, or of all kernels of a stream."""
    if isinstance(work, Matmul):
        flops = 2.0 * math.prod(work.sizes)
        return Piece("products", work.precision, flops, unknown=work.unknown)
    if isinstance(work, Attention):
        backward, unknown = work.phase == "backward", work.unknown
        mask = work.mask
        if mask.seen is None:
            unknown = unknown or "what its mask leaves is not known before it runs"
        left = 1 - mask.layers + mask.layers * (mask.seen or 0.0)
        flops = left * scores_flops(work.sizes, work.causal, backward)
        return Piece(
            "attention",
            work.kernel,
            flops,
            sizes=work.sizes,
            causal=work.causal,
            backward=backward,
            unknown=unknown,
        )
    moved = work.bytes if isinstance(work, Stream | HostCopy | Collective) else 0.0
    if name == NORM:
        return Piece("elementwise", "norm", bytes=moved, unknown=work.unknown)
    family = "optimizer" if work.phase == "optimizer" else "elementwise"
    family = "copies" if isinstance(work, HostCopy) else family
    return Piece(family, STREAMS[family], bytes=moved, unknown=work.unknown)


# --- a row's plan ----------------------------------------------------------------------------


def parser(says: str | None = None) -> argparse.ArgumentParser:
    """Return the parser of a plan's words, as rows have them in their command."""
    made = argparse.ArgumentParser(description=says)
    made.add_argument("shape")
    made.add_argument("--with", nargs="*", default=[], dest="with_")
    made.add_argument("--without", nargs="*", default=[])
    made.add_argument("--set", nargs="*", default=[])
    return made


def plan_from(args: argparse.Namespace) -> Plan:
    """Return the shape's plan with those changes."""
    return Plan.read(
        (PLANS / f"{args.shape}.toml").read_text(),
        catalogue(),
        overrides=args.set,
        with_=args.with_,
        without=args.without,
    )


def fingerprints(plan: Plan) -> Iterator[str]:
    """Yield the fingerprint of the plan, and those from before the keys of `SINCE`."""
    text = plan.dump()
    yield receipts.sha256(text)
    for *sections, key in reversed(SINCE):
        holder, owner = text, plan
        for section in sections:
            holder, owner = holder[section], getattr(owner, section)
        field = type(owner).model_fields[key]
        if getattr(owner, key) != field.get_default(call_default_factory=True):
            return
        del holder[key]
        yield receipts.sha256(text)


def pieces(row: dict[str, Any]) -> list[Piece]:
    """Return the work of a row: its own, or that of the plan that its command makes.

    Raises:
        ConfigError, UnsupportedError: the plan is another one now, or its work is unavailable.
    """
    if "no_work" in row:
        raise UnsupportedError(row["no_work"], "")
    if "work" in row:
        return [Piece.read(one) for one in row["work"]]
    args, _ = parser().parse_known_args(shlex.split(row["command"])[2:])
    try:
        plan = plan_from(args)
    except OSError:
        raise ConfigError(f"there is no shape {args.shape} any more", "") from None
    if row.get("plan_sha256") not in set(fingerprints(plan)):
        raise ConfigError("its command makes a plan of another fingerprint today", "")
    context = elsewhere(make_context(plan, torch.device("cpu")), row["hardware"])
    computed = work_of(plan, context)
    if not EARLIER.keys() & row["metrics"].keys():
        return computed
    return [replace(p, family="other") if p.what == "norm" else p for p in computed]


# --- the table -------------------------------------------------------------------------------


@dataclass(frozen=True)
class Gap:
    """Compare one family with its ceiling.

    Args:
        spent_ms: of the profiled step.
        unit: "flops" or "bytes"; "" without work.
        amount: of work.
        ceiling_ms: what the work would take; 0 without work, None where that is unavailable.
    """

    family: str
    spent_ms: float
    unit: str = ""
    amount: float = 0.0
    ceiling_ms: float | None = 0.0

    @property
    def lost_ms(self) -> float | None:
        """Return the milliseconds above the ceiling."""
        return None if self.ceiling_ms is None else self.spent_ms - self.ceiling_ms

    def cells(self, step_ms: float) -> list[str]:
        """Return the cells of the table, a dash for what is missing."""
        shown = [
            LABELS.get(self.family, self.family),
            f"{self.spent_ms:.2f}",
            f"{self.spent_ms / step_ms:.1%}",
        ]
        lost = "-" if self.lost_ms is None else f"{self.lost_ms:.2f}"
        if not (self.unit and self.ceiling_ms and self.spent_ms):
            return [*shown, *["-"] * 4, lost]
        name, scale = UNITS[self.unit]
        rates = [
            f"{self.amount / ms / 1e9:.4g} {RATES[self.unit]}"
            for ms in (self.spent_ms, self.ceiling_ms)
        ]
        share = f"{self.ceiling_ms / self.spent_ms:.1%}"
        return [*shown, f"{self.amount / scale:.4g} {name}", *rates, share, lost]


def gaps_of(row: dict[str, Any], work: Iterable[Piece], machine: Machine) -> tuple[list[Gap], str]:
    """Return the gap of each family of a row, the largest first, and why some work is missing."""
    by_family: dict[str, list[Piece]] = {}
    for piece in work:
        by_family.setdefault(piece.family, []).append(piece)
    gaps, unknown = [], []
    for family, spent_ms in spent(row).items():
        done = by_family.get(family, [])
        unit = "flops" if any(p.flops for p in done) else "bytes" if done else ""
        try:
            if why := next((p.unknown for p in done if p.unknown), ""):
                raise UnsupportedError(why, "")
            ceiling_ms = 1e3 * sum(p.ceiling_s(machine) for p in done)
        except UnsupportedError as error:
            ceiling_ms = None
            unknown.append(f"{family}: {error.message}")
        gaps.append(Gap(family, spent_ms, unit, sum(getattr(p, unit) for p in done), ceiling_ms))
    gaps.sort(key=lambda gap: -math.inf if gap.lost_ms is None else gap.lost_ms, reverse=True)
    return gaps, "; ".join(unknown)


def spent(row: dict[str, Any]) -> dict[str, float]:
    """Return milliseconds of a profiled step, by today's names of families."""
    metrics: dict[str, dict[str, Any]] = row["metrics"]
    times = {n: float(metric["value"]) for n, metric in metrics.items() if n not in NO_FAMILIES}
    return {EARLIER.get(name, name): ms for name, ms in times.items()}


def best(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the fastest row of each shape, precision and device, of those with idle times.

    One whose work is known goes before one whose plan is another today.
    """

    def order(row: dict[str, Any]) -> tuple[bool, float]:
        return not _is_known(row), row["metrics"]["step"]["value"]

    fastest: dict[tuple[str, ...], dict[str, Any]] = {}
    for row in rows:
        if {"step", "idle"} <= row.get("metrics", {}).keys():
            key = (row["shape"], precision(row), row["hardware"])
            fastest[key] = min(fastest.get(key, row), row, key=order)
    return [fastest[key] for key in sorted(fastest)]


def _is_known(row: dict[str, Any]) -> bool:
    try:
        return bool(pieces(row))
    except (ConfigError, UnsupportedError):
        return False


def precision(row: dict[str, Any]) -> str:
    """Return the precision of the blocks' matmuls, by the techniques that were on."""
    return "fp8" if "float8_linear" in row["techniques"] else "bf16"


def ceilings(hardware: str) -> str:
    """Return a sentence with the ceilings that rows of a device are compared with."""
    try:
        machine = Machine.assumed(hardware)
    except UnsupportedError as error:
        return f"{hardware} has no ceilings: {error.message}."
    m, n, k = ANCHOR_MATMUL
    rates = {p: 2e-12 * m * n * k / machine.matmul_s(p, m, n, k) for p in PRECISIONS}
    matmuls = " and ".join(f"{rate:,.0f} TFLOP/s in {p}" for p, rate in rates.items())
    return (
        f"Ceilings of {hardware} (`headrace/costs/assumed.py` says where they are from): matmuls "
        f"{matmuls}, {machine.traffic.bytes_per_s / 1e12:.3g} TB/s, attention of the plan's "
        "kernel at the plan's shape."
    )


def section(rows: Iterable[dict[str, Any]]) -> str:
    """Return the ceilings and all tables; nothing without rows."""
    chosen = best(rows)
    devices = dict.fromkeys(row["hardware"] for row in chosen)
    return "\n\n".join([*map(ceilings, devices), *map(table, chosen)])


def table(row: dict[str, Any]) -> str:
    """Return one row beside its ceilings as Markdown, and what is lost by family."""
    step_ms, timed_ms = sum(spent(row).values()), row["metrics"]["step"]["value"]
    try:
        gaps, unknown = gaps_of(row, pieces(row), Machine.assumed(row["hardware"]))
    except (ConfigError, UnsupportedError) as error:
        gaps = [Gap(family, ms, ceiling_ms=None) for family, ms in spent(row).items()]
        gaps.sort(key=lambda gap: -gap.spent_ms)
        unknown = error.message
    lost = [(LABELS.get(g.family, g.family), g.lost_ms) for g in gaps if g.lost_ms is not None]
    sentence = f"{step_ms:.1f} ms (kernels and idle; unprofiled, a step took {timed_ms:.1f})"
    if lost:
        total, whom = sum(ms for _, ms in lost), ", ".join(f"{n} {ms:.1f}" for n, ms in lost)
        sentence = (
            f"Of {sentence}, {total:.1f} ms, {total / step_ms:.1%}, are above the ceilings: {whom}."
        )
    else:
        sentence = f"What of {sentence} is above the ceilings is not known."
    return "\n".join(
        [
            f"**kernels: {row['shape']} in {precision(row)}** ({row['hardware']}, n = {row['n']}, "
            f"{row['commit']}, `{row['command']}`)",
            "",
            f"| {' | '.join(HEADS)} |",
            f"|{'---|' * len(HEADS)}",
            *(f"| {' | '.join(gap.cells(step_ms))} |" for gap in gaps),
            "",
            sentence + (f" Not told: {unknown}." if unknown else ""),
        ]
    )

"""Write the page of `headrace compress`: size against bits per byte, and what each point costs."""

import numpy as np

from headrace.core.units import format_bytes
from headrace.export.compression import Compression, PointReading
from headrace.report.chart import ChartAxis, ChartLine, line_chart
from headrace.report.page import (
    Safe,
    cards,
    figure,
    join,
    legend,
    muted,
    page,
    section,
    swatch,
    table,
    tag,
)

POINT_HEAD = (
    "point",
    "size",
    "of fp32",
    "bits per byte",
    "rise",
    "logits from fp32",
    "from reference",
    "tokens/s here",
    "forecast",
)
"""What `point_rows` holds."""
MOST_BARS = 24
"""Matrices whose sensitivity is listed."""


def point_rows(compression: Compression) -> list[list[str]]:
    """Return a row of the fp32 model and of each point."""
    whole = compression.whole
    return [
        [
            point.name,
            format_bytes(point.bytes),
            f"{point.bytes / whole.bytes:.2f}x",
            f"{point.bits_per_byte:.4f}",
            f"{point.rise:+.3%}",
            f"{point.logits_from_whole:.3g}",
            f"{point.logits_from_reference:.1e}",
            f"{point.tokens_per_s:.1f}",
            f"{point.forecast_tokens_per_s:.1f}",
        ]
        for point in (whole, *compression.points)
    ]


def front_of(points: tuple[PointReading, ...]) -> list[PointReading]:
    """Return the points than which none is both smaller and better, by size."""
    front: list[PointReading] = []
    for point in sorted(points, key=lambda p: (p.bytes, p.bits_per_byte)):
        if not front or point.bits_per_byte < front[-1].bits_per_byte:
            front.append(point)
    return front


def verdict_of(compression: Compression) -> str:
    """Return in a sentence which point is chosen, and why."""
    chosen, goal = compression.chosen, compression.goal
    if goal.budget_bytes is not None:
        asked = f"within {format_bytes(goal.budget_bytes)}"
    else:
        asked = f"within {100 * (goal.rise if goal.rise is not None else 0.01):g}% of fp32's loss"
    if chosen is None:
        return f"no point is {asked}"
    return (
        f"{chosen.name} is {'best' if goal.budget_bytes is not None else 'smallest'} {asked}: "
        f"{chosen.bytes / compression.whole.bytes:.2f}x of fp32's size, bits per byte "
        f"{chosen.rise:+.3%}"
    )


def compression_page(compression: Compression) -> str:
    """Return the whole page; everything that names could hold is escaped."""
    chosen = compression.chosen
    badge = tag(
        "span", chosen.name if chosen else "none", class_="badge good" if chosen else "badge"
    )
    return page(
        f"{compression.model}: compressed",
        tag(
            "header",
            tag("p", "headrace compress", class_="eyebrow"),
            tag("h1", compression.model),
            badge,
            tag("p", verdict_of(compression), class_="verdict"),
            _figures(compression),
        ),
        _pareto(compression),
        section(
            "Points",
            table("Every point", POINT_HEAD, point_rows(compression)),
            muted(
                f"Measured on {compression.tokens:,} validation targets, on the file that each "
                "point wrote. Decoding is one sequence by torch and torchao as they are: torchao "
                "makes weights whole for each product, so it shows size and not the speed of a "
                "runtime that multiplies codes."
            ),
            _pruned(compression),
        ),
        _sensitivity(compression),
        _unquantized(compression),
    )


def _pruned(compression: Compression) -> Safe:
    """Say what is left of pruned points, and what would multiply less for it."""
    points = [point for point in compression.points if point.pruned]
    if not points:
        return join(())
    shares = ", ".join(f"{point.name} {point.pruned:.1%}" for point in points)
    return muted(
        f"Pruned in the linears of blocks: {shares}. Their files hold the numbers that are left "
        "and a bit a number. Here they are multiplied whole, zeros too, so that no CPU decodes "
        "faster for them. NVIDIA GPUs from Ampere on multiply 2:4 in bf16 or fp16 by torch's "
        "SparseSemiStructuredTensor."
    )


def _figures(compression: Compression) -> Safe:
    chosen, whole = compression.chosen, compression.whole
    if chosen is None:
        return cards([("fp32", format_bytes(whole.bytes), f"{whole.bits_per_byte:.4f} bits/byte")])
    return cards(
        [
            ("Size", format_bytes(chosen.bytes), f"fp32 has {format_bytes(whole.bytes)}"),
            ("Bits per byte", f"{chosen.bits_per_byte:.4f}", f"fp32 has {whole.bits_per_byte:.4f}"),
            ("Drift", f"{chosen.logits_from_reference:.1e}", "logits from the reference"),
        ]
    )


def _pareto(compression: Compression) -> Safe:
    """Render size against bits per byte: the front as a curve, other points beside it."""
    every = (compression.whole, *compression.points)
    front = front_of(every)
    beside = [_marks([point], "c1") for point in every if point not in front]
    goal = compression.goal
    chart = line_chart(
        "pareto",
        [*beside, _marks(front, "c0")],
        label="Bits per byte by size in megabytes, of fp32 and every point",
        axis=ChartAxis("MB", lambda value: f"{value:.3g}"),
        y_label="bits per byte",
        goal=None if goal.rise is None else compression.whole.bits_per_byte * (1 + goal.rise),
        limit=None if goal.budget_bytes is None else goal.budget_bytes / 1e6,
    )
    key = legend([(swatch("c0", "line"), "Pareto front"), (swatch("c1"), "other points")])
    names = ", ".join(f"{point.name} {point.bytes / 1e6:.3g} MB" for point in front)
    return section(
        "Size against loss",
        figure("Bits per byte by size", join((key, chart))),
        muted(f"On the front, from small to large: {names}."),
    )


def _marks(points: list[PointReading], colour: str) -> ChartLine:
    sizes = np.array([point.bytes / 1e6 for point in points])
    return ChartLine(sizes, np.array([p.bits_per_byte for p in points]), colour, marks=True)


def _sensitivity(compression: Compression) -> Safe:
    """Render the matrices that quantization hurts most."""
    if not compression.sensitivity:
        return join(())
    kept = {name for point in compression.points for name in point.higher}
    rows = [
        [name, f"{nats:.2e}", "8 bits in the hybrid" if name in kept else ""]
        for name, nats in [*compression.sensitivity.items()][:MOST_BARS]
    ]
    return section(
        "Sensitivity",
        table("Sensitivity by matrix", ("matrix", "nats a token", "kept"), rows),
        muted("What quantizing this matrix alone does: KL divergence from the fp32 model."),
    )


def _unquantized(compression: Compression) -> Safe:
    if not compression.unquantized:
        return join(())
    total = format_bytes(sum(compression.unquantized.values()))
    names = ", ".join(compression.unquantized)
    return section("Left in fp32", muted(f"{total} of matrices that no preset quantizes: {names}."))

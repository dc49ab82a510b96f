"""A CPU whose rates are made up, so that tests of its predictions time nothing."""

from dataclasses import replace

from headrace.costs.machine import Machine
from headrace.costs.rates import (
    Absent,
    AttentionPoint,
    AttentionRates,
    LinearMatmul,
    LinearRates,
    MatmulPoint,
    MeasuredStep,
    PieceRates,
    StreamPoint,
    StreamRates,
)

FLOPS, BYTES_PER_S, BEGIN_S = 100e9, 10e9, 5e-6
"""FLOP/s of matmuls and attention, bytes/s of other work, and seconds that starting one takes."""
LINEAR_MATMULS: tuple[LinearMatmul, ...] = ("result", "input", "weight")
SHAPES = ((4096, 384, 128), (512, 128, 128), (2048, 2048, 256))
PIECES = ("norms", "activation", "rope", "loss", "qk_norm", "residual", "residual_out", "embedding")
UPDATES = ("gradients/backward", "clip/optimizer", "update/optimizer")


def probed_cpu(*steps: MeasuredStep, flops: float = FLOPS, threads: int = 2) -> Machine:
    """Return a made-up probed CPU whose whole steps, if any, took as long as `steps` say."""
    names = [f"{name}/{way}" for name in PIECES for way in ("forward", "backward")]
    moved = tuple(StreamPoint(b, BEGIN_S + b / BYTES_PER_S) for b in (1 << 16, 1 << 22, 1 << 27))
    products = tuple(MatmulPoint(m, n, k, BEGIN_S + 2 * m * n * k / flops) for m, n, k in SHAPES)
    attention = tuple(
        AttentionRates(
            "flash",
            backward,
            flops,
            tuple(
                AttentionPoint(
                    8, 4, 4, length, 32, True, (2.5 if backward else 1) * 2e-9 * length**2
                )
                for length in (128, 512)
            ),
        )
        for backward in (False, True)
    )
    return replace(
        Machine.assumed("cpu"),
        source="probes",
        says="made up",
        date="2026-11-25",
        torch="2.13.0",
        driver=f"a processor, {threads} threads",
        processors=threads,
        launch_s=1e-6,
        traffic=StreamRates(BEGIN_S, 5 * BYTES_PER_S),
        matmuls=(),
        attention=attention,
        absent=(Absent("captured graphs", "a CPU has none"),),
        linears=tuple(LinearRates(matmul, "fp32", products) for matmul in LINEAR_MATMULS),
        pieces=tuple(
            PieceRates(n, n in UPDATES or n.startswith("embedding"), moved)
            for n in (*names, *UPDATES)
        ),
        steps=steps,
    ).fitted()

"""Format a machine's rates as a table: for each operation the fastest one, measured or assumed."""

from headrace.core.units import format_bytes, format_seconds
from headrace.costs.machine import Machine
from headrace.costs.rates import BACKWARD, MeasuredStep

MANY_BYTES = 2**30
"""Bytes of the copy whose rate the table shows: 1 GiB."""


def table(machine: Machine) -> list[list[str]]:
    """Return the rows of the table: what was measured or assumed, and how fast it is."""
    rows = []
    for known in machine.matmuls:
        best = max(known.points, key=lambda p: p.flops / p.seconds)
        what = f"products in {known.precision}, {best.m} x {best.n} x {best.k}"
        rows.append([what, f"{best.flops / best.seconds / 1e12:.4g} TFLOP/s"])
    for mixing in machine.attention:
        if not mixing.points:
            continue
        work = {p: _work(p.shape, p.causal, mixing.backward) / p.seconds for p in mixing.points}
        best = max(work, key=lambda p: work[p])
        direction = "backward" if mixing.backward else "forward"
        what = f"attention by {mixing.kernel}, {direction}, {best.length} tokens of {best.features}"
        rows.append([what, f"{work[best] / 1e12:.4g} TFLOP/s"])
    rate = MANY_BYTES / machine.traffic_s(MANY_BYTES)
    rows.append(["reading and writing memory", f"{rate / 1e9:.4g} GB/s"])
    rows.append(["a small kernel", format_seconds(machine.traffic_s(1))])
    rows.append(["the host, for one operation", format_seconds(machine.launch_s)])
    if machine.kind == "gpu":
        for direction, to_host in (("to", True), ("from", False)):
            rate = MANY_BYTES / machine.link_s(MANY_BYTES, to_host)
            rows.append([f"copies {direction} the host", f"{rate / 1e9:.4g} GB/s"])
        rows.append(["held by the driver and libraries", format_bytes(machine.context_bytes)])
    for link in machine.links:
        name = link.operation.replace("_", "-")
        rate = f"{link.stream.bytes_per_s / 1e9:.4g} GB/s a rank"
        rows.append([f"{name} over {link.ranks} ranks", rate])
    rows += [[_what(step), format_seconds(step.seconds)] for step in machine.steps]
    rows += [[absent.what, f"none: {absent.why}"] for absent in machine.absent]
    rows += [[what, "no time left"] for what in machine.skipped]
    return rows


def _what(step: MeasuredStep) -> str:
    """Return words for the small decoder's step that was timed, and for how it ran."""
    words = f"a step of {step.layers} layers of {step.dim}, {step.rows} rows of {step.length}"
    how = f", {step.threads} thread{'s' if step.threads > 1 else ''}"
    return words + how + ", compiled" * step.compiled + ", memory kept" * step.keeps


def _work(shape: tuple[int, int, int, int, int], causal: bool, backward: bool) -> float:
    """Return the FLOPs of an attention pass; a causal mask leaves half of the scores."""
    rows, heads, _, length, features = shape
    forward = 4.0 * rows * heads * length**2 * features / (2 if causal else 1)
    return forward * (BACKWARD if backward else 1)

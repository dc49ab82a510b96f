"""A host and a device that write what Kineto would: launches run ahead, kernels queue on streams.

All times are in microseconds. A kernel starts LATENCY after its call, or when its stream is free.
"""

import gzip
import json
from pathlib import Path
from typing import Any

LATENCY, CALL = 4.0, 5.0
COMPUTE, NETWORK, SIDE = 7, 20, 30
GEMM = "nvjet_tst_128x256_64x4_2x1_v_bz_coopA_TNT"
REDUCE = "ncclDevKernel_AllReduce_Sum_bf16_RING_LL(ncclDevKernelArgsStorage<4096ul>)"
POINTWISE = "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<float>>"
TO_DEVICE, TO_HOST = "Memcpy HtoD (Pageable -> Device)", "Memcpy DtoH (Device -> Pageable)"


class Recorder:
    """One rank's trace as it is made."""

    def __init__(self, rank: int | None = None, world: int = 1) -> None:
        self.events: list[dict[str, Any]] = []
        self.now, self.calls, self.step = 1e9, 0, 3
        self.free: dict[int, float] = dict.fromkeys((COMPUTE, NETWORK, SIDE), 0.0)
        self.rank, self.world = rank, world
        self.began = self.now

    def host(self, cat: str, name: str, start: float, call: int = 0) -> None:
        """An event of the host that ends now."""
        args = {"External id": 1} | ({"correlation": call} if call else {})
        self._event(cat, name, start, self.now - start, 100, args)

    def _event(
        self, cat: str, name: str, ts: float, dur: float, tid: int, args: dict[str, Any]
    ) -> None:
        pid = 0 if tid < 100 else 100
        self.events.append(
            {
                "ph": "X",
                "cat": cat,
                "name": name,
                "pid": pid,
                "tid": tid,
                "ts": ts,
                "dur": dur,
                "args": args,
            }
        )

    def run(
        self,
        name: str,
        dur: float,
        stream: int = COMPUTE,
        *,
        cost: float = CALL,
        after: tuple[int, ...] = (),
        launch: str = "cudaLaunchKernel",
        count: int = 1,
        gap: float = 0,
        op: tuple[str, list[Any], list[Any]] | None = None,
    ) -> None:
        """Launch a kernel, or a graph of `count`, behind its stream and those of `after`.

        `op` is the operation that launches it: name, shapes and types.
        """
        self.calls += 1
        call, begun = self.calls, self.now
        self.now += cost
        self.host("cuda_runtime", launch, begun, call)
        if op is not None:
            shapes = {"External id": call, "Input Dims": op[1], "Input type": op[2]}
            self._event("cpu_op", op[0], begun, cost, 100, shapes)
        cat = "gpu_memcpy" if name.startswith("Memcpy") else "kernel"
        start = max(begun + LATENCY, *(self.free[s] for s in (stream, *after)))
        for _ in range(count):
            args = {"device": 0, "stream": stream, "correlation": call, "External id": call}
            self._event(cat, name, start, dur, stream, args)
            self.free[stream] = start + dur
            start += dur + gap

    def wait(self, name: str = "cudaStreamSynchronize", op: str = "") -> None:
        """The host waits for the device."""
        begun = self.now
        self.now = max(self.now, *self.free.values()) + CALL
        self.host("cuda_runtime", name, begun)
        if op:
            self.host("cpu_op", op, begun - 1)

    def away(self, dur: float, name: str = "", cat: str = "user_annotation") -> None:
        """The host does something else, under a name or none."""
        begun = self.now
        self.now += dur
        if name:
            self.host(cat, name, begun)

    def end_step(self) -> None:
        """Write the profiler's mark of a step."""
        self.host("user_annotation", f"ProfilerStep#{self.step}", self.began)
        self.step, self.began = self.step + 1, self.now

    def write(self, path: Path, **more: Any) -> Path:
        """Save it as .json or .json.gz."""
        whole = {"schemaVersion": 1, "traceEvents": self.events, **more}
        if self.rank is not None:
            whole["distributedInfo"] = {"rank": self.rank, "world_size": self.world}
        text = json.dumps(whole).encode()
        path.write_bytes(gzip.compress(text) if path.suffix == ".gz" else text)
        return path

"""Let cuDNN time its algorithms for each convolution, and keep the fastest.

cuDNN has several algorithms for one convolution and picks by a heuristic. With this flag torch
times them at a shape's first call and uses the fastest from then on: forward, and both gradients.
The flag is one of the process; it is set for the run and restored. torch tries the first ten of the
heuristic's list (`torch.backends.cudnn.benchmark_limit`), and each may ask for its own workspace.

There is nothing to choose where nothing is a convolution, or where torch computes it by a kernel of
its own, as it does depthwise convolutions in bf16 and fp32 whose features come first. So evidence
is the flag as it stood while the run's steps ran, and the library that torch gave each of their
convolutions to. Results may differ in their last digits from one run to the next, as another
algorithm wins. Left out: the choice of attention's backend, which cuDNN makes by heuristic alone.
Source: docs.pytorch.org, torch.backends.cudnn.benchmark.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger
from headrace.kernels.autocast import compute_dtype
from headrace.kernels.launches import COUNTS, since
from headrace.model.convolution import CUDNN, LAUNCH, CausalConvolution, libraries
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

CONVOLVING, MASKING = "short_convolution", "document_packing"


@contextmanager
def timed_algorithms() -> Iterator[None]:
    """Time cuDNN's algorithms while it lasts."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _count_library(seen: Mapping[str, int], module: Any, given: tuple[Tensor]) -> None:
    """Count the library that torch gives a convolution to, in the run's first step."""
    if seen["timed"] or seen["plain"]:
        return
    dtype = compute_dtype(given[0])
    bias = None if module.bias is None else module.bias.to(dtype)
    backend = torch._C._select_conv_backend(
        given[0].to(dtype),
        module.weight.to(dtype),
        bias=bias,
        stride=[*module.stride],
        padding=[*module.padding],
        dilation=[*module.dilation],
        transposed=False,
        output_padding=[0, 0],
        groups=module.groups,
        bias_sizes=None if bias is None else [bias.numel()],
    )
    COUNTS[LAUNCH + str(backend).rpartition(".")[2]] += 1


class CudnnAutotune(Technique[Build]):
    """Let cuDNN time its algorithms for each convolution, and keep the fastest."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.STEP
    images: ClassVar[bool] = True
    composes: ClassVar[tuple[str, ...]] = ("runtime", "after_update")
    symptoms: ClassVar[tuple[str, ...]] = ("kernel efficiency:convolution",)
    card: ClassVar[Card] = Card(
        buys=(
            "the fastest of up to ten algorithms for each convolution, where the heuristic's "
            "is another one (derived)"
        ),
        costs=(
            "the first step of every shape times them all, forward and both gradients, with "
            "a workspace for each",
            "lengths that change are timed again, each of them (derived)",
        ),
        helps="many steps of one shape in which convolutions take a share",
        hurts="short runs, and rows whose length changes; nothing changes where cuDNN convolves "
        "nothing",
        source="docs.pytorch.org/docs/stable/backends.html (torch.backends.cudnn.benchmark)",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support an NVIDIA GPU with cuDNN, and plans that convolve."""
        if context.device != "cuda":
            return Unsupported(
                f"{context.device} has no cuDNN", mend("device=cuda"), RefusalKind.DEVICE
            )
        if torch.cuda.is_available() and not torch.backends.cudnn.is_available():
            return Unsupported(
                "this torch was built without cuDNN", "pip install torch", RefusalKind.PACKAGE
            )
        if torch.version.hip is not None:
            return Unsupported(
                "an AMD GPU convolves by MIOpen, not by cuDNN", "an NVIDIA GPU", RefusalKind.DEVICE
            )
        if context.plan is not None and context.plan.vision is not None:
            return Supported()
        on = context.plan.techniques if context.plan else {}
        if CONVOLVING not in on:
            return Unsupported(
                "this plan has no convolutions, so cuDNN has no algorithm to choose",
                mend(f"+{CONVOLVING}"),
                RefusalKind.COMBINATION,
            )
        if MASKING in on:
            return Unsupported(
                f"{MASKING} keeps documents apart, which no convolution knows of: {CONVOLVING} "
                "multiplies tap by tap there and launches none",
                mend(f"-{MASKING}"),
                RefusalKind.COMBINATION,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Leave tensors as they are; a workspace is known only when an algorithm is chosen."""
        return ledger

    def apply(self, build: Build) -> None:
        """Set one flag of the process, and look at it in each step."""
        seen: dict[str, int] = {"timed": 0, "plain": 0}
        build.notes[self.name()] = {"seen": seen, "before": since({}, LAUNCH)}

        if build.plan.vision is not None:
            for module in build.model.modules():
                if isinstance(module, nn.Conv2d):
                    module.register_forward_pre_hook(partial(_count_library, seen))

        def look(build: Build, finite: Tensor) -> None:
            seen["timed" if torch.backends.cudnn.benchmark else "plain"] += 1

        build.runtime.append(timed_algorithms)
        build.after_update.append(look)

    def active(self, build: Build) -> Evidence:
        """Read the steps under the flag, and what the run's convolutions were launched with."""
        noted: dict[str, Any] = build.notes[self.name()]
        seen, launched = noted["seen"], libraries(noted["before"])
        layers = (CausalConvolution, nn.Conv2d)
        here = [m for m in build.model.modules() if isinstance(m, layers)]
        steps = f"{seen['timed']} of {seen['timed'] + seen['plain']} steps ran under the flag"
        timed = seen["timed"] > 0 == seen["plain"]
        # A network's convolutions are of several kinds, some of which torch has one kernel for.
        is_network = any(isinstance(module, nn.Conv2d) for module in here)
        others = set() if is_network else {*launched} - {CUDNN}
        how = " and ".join(f"{count} by {name}" for name, count in launched.items())
        return Evidence(
            active=None if timed and not here else timed and CUDNN in launched and not others,
            detail=f"{steps}; convolutions launched: {how or 'none'}",
            numbers={"steps": seen["timed"], "launched": sum(launched.values())},
        )

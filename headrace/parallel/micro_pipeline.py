"""Overlap collectives of tensor parallelism with the matmuls that they wait for.

Torch's compiler finds an all-gather that a matmul reads, and a matmul whose result is reduced and
scattered, and makes one operation of both: it cuts the matmul by ranks, and copies one rank's part
over NVLink while another part is multiplied. Copies read the other ranks' memory, which has to be
allocated for that (symmetric memory). The result is that of the plain operations but for the order
in which parts are added up. Torch calls it asynchronous tensor parallelism: torch._inductor's pass
micro_pipeline_tp, torch.distributed._symmetric_memory; torchtitan uses both.

NVLink multicast stays off: nothing here needs it.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch.distributed as dist

from headrace.core.errors import ConfigError
from headrace.core.remedy import mend
from headrace.kernels.launches import COUNTS

PREFIX = "micro_pipeline"
"""How the names of launches begin."""
GATHERS, SCATTERS = f"{PREFIX}_gather", f"{PREFIX}_scatter"
FUNCTIONS = {
    "_fused_all_gather_matmul_impl": GATHERS,
    "_fused_matmul_reduce_scatter_impl": SCATTERS,
}
"""Torch's functions that multiply while they send -> the name of their launches."""
LEAST_BYTES = 4096
"""Bytes of memory that ranks share at first, to see whether they can; torch lets it grow."""


def share_memory(group: dist.ProcessGroup) -> None:
    """Let the ranks of a group read each other's memory; all of them call it together.

    Raises:
        ConfigError: these ranks cannot, as on several hosts, or this version of torch counts no
            launches.
    """
    from torch.distributed import _symmetric_memory as memory

    os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] = "1"
    try:
        _count_launches()
        memory.enable_symm_mem_for_group(group.group_name)
        memory.get_symm_mem_workspace(group.group_name, LEAST_BYTES)
    except (AttributeError, RuntimeError) as error:
        raise ConfigError(
            f"these ranks cannot read each other's memory: {str(error).splitlines()[0]}",
            mend("techniques.tensor_parallel.asynchronous=false"),
        ) from error


@cache
def _count_launches() -> None:
    """Count the calls of torch's functions, in eager and in compiled code alike, for good."""
    from torch.distributed import _symmetric_memory as memory

    def counted(name: str, plain: Any) -> Any:
        def call(*given: Any, **named: Any) -> Any:
            COUNTS[name] += 1
            return plain(*given, **named)

        return call

    for function, name in FUNCTIONS.items():
        setattr(memory, function, counted(name, getattr(memory, function)))


@contextmanager
def compiling() -> Iterator[None]:
    """Let torch's compiler fuse collectives and matmuls, in the backward pass too.

    A thread of autograd would compile the backward pass, and not see this; so it is compiled with
    the forward pass.
    """
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    with (
        inductor.patch(_micro_pipeline_tp=True),
        autograd.patch(force_non_lazy_backward_lowering=True),
    ):
        yield

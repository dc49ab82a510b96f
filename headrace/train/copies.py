"""Copy what is saved to the host, beside the kernels that are launched meanwhile.

A GPU fills page-locked memory of the host while it computes. So the copies of a checkpoint go on a
stream of their own, and what would change their sources is held back on the device until they are
whole; the host goes on launching. torch keeps page-locked blocks, so only the first save of a run
has to make them.
"""

from collections.abc import Callable

import torch
from torch import Tensor


class Copies:
    """Copy tensors to the host; those of a GPU into page-locked memory.

    Args:
        before_change: takes what must be called before any of the tensors changes. With it a GPU's
            copies go on beside the kernels that are launched after them; without it `end` waits.
    """

    def __init__(self, before_change: list[Callable[[], None]] | None = None) -> None:
        self._before_change = before_change
        self._device: torch.device | None = None
        self._stream: torch.cuda.Stream | None = None
        self._done: torch.cuda.Event | None = None

    def to_host(self, tensor: Tensor) -> Tensor:
        """Return the tensor's copy, which may be on its way until `wait` returns."""
        if not tensor.is_cuda:
            return tensor.clone().contiguous().cpu()
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        if self._stream is None:
            self._device = tensor.device
            now = torch.cuda.current_stream(tensor.device)
            self._stream = (
                torch.cuda.Stream(tensor.device) if self._before_change is not None else now
            )
            self._stream.wait_stream(now)
        tensor.record_stream(self._stream)
        with torch.cuda.stream(self._stream):
            return host.copy_(tensor, non_blocking=True)

    def end(self) -> None:
        """Mark the end of the copies, and wait for them unless they go on beside kernels."""
        if self._stream is not None:
            self._done = torch.cuda.Event()
            self._done.record(self._stream)
            if self._before_change is None:
                self._done.synchronize()
            else:
                self._before_change.append(self.hold_back)

    def hold_back(self) -> None:
        """Have the device wait for the copies before what is launched next; the host does not."""
        if self._done is not None:
            torch.cuda.current_stream(self._device).wait_event(self._done)

    def wait(self) -> None:
        """Wait on the host until every copy is whole."""
        if self._done is not None:
            self._done.synchronize()

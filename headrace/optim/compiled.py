"""Compile an optimizer's update, once for each shape, or say why that cannot be here.

A compiler keeps its results by code object, and gives up on one that has many. So each shape has a
copy of the function, with a code object of its own. It writes into weights and states, so that a
compiler that records CUDA graphs leaves it out.
"""

from collections.abc import Callable, Sequence
from types import FunctionType
from typing import Any

import torch
from torch import Tensor

from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.plan.technique import Context, Unsupported


def lacks_compiler(context: Context, name: str) -> Unsupported | None:
    """Return why the knob `compiled` of a technique cannot be on; None where it can.

    Args:
        context: where the plan runs.
        name: of the technique.
    """
    if context.device == "cuda" and not context.has_triton:
        return Unsupported(
            "compiled = true needs Triton on a GPU", "pip install triton", RefusalKind.PACKAGE
        )
    if context.device == "cpu" and not context.has_compiler:
        return Unsupported(
            "compiled = true needs a C++ compiler on a CPU", "install g++", RefusalKind.PACKAGE
        )
    if context.device == "mps":
        return Unsupported(
            "compiling on Apple GPUs is not proven here",
            mend(f"techniques.{name}.compiled=false"),
            RefusalKind.DEVICE,
        )
    return None


class CompiledUpdates:
    """Hold the compiled functions of one optimizer, by what makes one compile anew.

    Args:
        name: begins the name of each.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._graphs: dict[Any, Callable[..., Any]] = {}

    def __len__(self) -> int:
        return len(self._graphs)

    def call(self, function: Any, given: Sequence[Any]) -> Any:
        """Call a function, compiled for the shapes that it is given.

        Args:
            function: takes tensors, lists of tensors of one shape, and what can be hashed.
            given: what it takes.
        """
        key = (function.__name__, *map(_kind, given))
        if key not in self._graphs:
            name = f"{self._name}_{function.__name__}{len(self._graphs)}"
            self._graphs[key] = _own_graph(function, name)
        return self._graphs[key](*given)


def _own_graph(function: FunctionType, name: str) -> Callable[..., Any]:
    """Return a compiled copy of a function, with a code object of its own."""
    code = function.__code__.replace(co_name=name, co_qualname=name)
    copy = FunctionType(code, function.__globals__, name, function.__defaults__)
    # It writes into weights, which CUDA graphs of a compiler would have to copy.
    unrecorded: dict[str, Any] = {"triton.cudagraphs": False}
    return torch.compile(copy, fullgraph=True, dynamic=False, options=unrecorded)


def _kind(given: Any) -> Any:
    """Return what of an argument makes a function compile anew."""
    if isinstance(given, Tensor):
        return given.shape, given.dtype
    if isinstance(given, list):
        return len(given), _kind(given[0])
    return given

"""Say why an optimizer's update cannot be compiled here."""

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

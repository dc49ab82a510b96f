"""Read what torch's compiler did in this process, from its own counters."""

import sys


def compile_seconds() -> float:
    """Return the seconds spent in torch.compile so far, forward and backward; 0 before its use."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    if dynamo is None:
        return 0.0
    spent = dynamo.calculate_time_spent()
    return float(spent.get("total_wall_time", 0.0))


def graph_breaks() -> int:
    """Return the breaks between compiled graphs so far; 0 before its first use."""
    dynamo = sys.modules.get("torch._dynamo.utils")
    return 0 if dynamo is None else sum(dynamo.counters["graph_break"].values())

"""Set every threshold for judging traces, in one place.

First stand how large a file may be and how many steps it needs, then what a measurement calls what
(in microseconds, as traces have them), then from what share of a step on a verdict is an alarm.
"""

MOST_BYTES = 2 * 1024**3
"""Largest trace that is read, unpacked. Reading takes two to three times the file's size in memory,
and a second per 16 MB."""
FEW_STEPS = 2
"""Steps that are enough: measured with fewer, a verdict is no more than inferred; with none the
doctor abstains."""
WARM_UP = 2.0
"""Times as long as the median from which a first step is left out, where three others remain."""

LAUNCH_LATENCY_US = 10.0
"""Longest time from a call to the start of its kernel on an idle device."""
CLOCK_SLACK_US = 20.0
"""How far a synchronisation may seem to end before the device did: two clocks, one trace."""
WAIT_SLACK_US = 20.0
"""A kernel that starts so soon after a collective has waited for it."""
BACK_TO_BACK_US = 5.0
"""Idle time between queued kernels below which it is the device's own cost of a launch."""
AWAY_US = 1000.0
"""A host that launches nothing for so long was busy with something else than launching."""
BRIEF_KERNEL_US = 10.0
"""Time under which TraceLens flags kernels."""

ALARM = 0.05
"""Share of a step under which idle, blocked or waiting time is no bottleneck (TraceLens,
Megatron-Bridge: 5%)"""
MEMORY_BOUND = 0.6
"""Share of a step in elementwise, normalisation and optimizer kernels before bandwidth is named."""
FUSION_RECOVERS = 0.15
"""Share of their time: the lowest of TraceLens's 15, 30 and 45% for what has no model."""
NEAR_ROOF = 0.6
"""Share of the measured bandwidth from which a kernel is called bound by it."""
BOUND_SHARE = 0.4
"""Share of the kernels' time bound by bandwidth, where shapes say, before it is named."""
INEFFICIENT = 0.6
"""Share of what the machine reaches at their shapes: matmuls and attention below it are named."""
WELL = 0.9
"""Share of what a machine reaches at a shape that a step may be expected to reach."""
WORTH_TELLING = 0.001
"""Share of a step below which a part is left out of the evidence."""
SLOW_MATMUL_RECOVERS = 0.75
"""Share of a float32 matmul's time that tensor cores save: they have 7 to 8 times the rate
(datasheets of A100 and H100)."""
OFFLOAD_SHARE = 0.25
"""Share of host copies leaving the device, before they are called offload rather than input."""
SAME_RANK = 0.8
"""Share of collectives that wait for one and the same rank, before it is named."""

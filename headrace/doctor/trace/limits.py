"""Every threshold of the trace's doctor, in one place.

First how large a file may be and how many steps it needs, then what a measurement calls what (in
microseconds, as traces have them), then from what share of a step on a verdict is an alarm.
"""

MOST_BYTES = 2 * 1024**3
"""unpacked; reading takes two to three times the file's size in memory, and a second per 16 MB"""
FEW_STEPS = 2
"""measured with fewer, a verdict is no more than inferred; with none the doctor abstains"""
WARM_UP = 2.0
"""a first step this many times as long as the median is left out, where three others remain"""

LAUNCH_LATENCY_US = 10.0
"""from a call to the start of its kernel on an idle device, at most"""
CLOCK_SLACK_US = 20.0
"""how far a synchronisation may seem to end before the device did: two clocks, one trace"""
WAIT_SLACK_US = 20.0
"""a kernel that starts so soon after a collective has waited for it"""
BACK_TO_BACK_US = 5.0
"""shorter idle times between queued kernels are the device's own cost of a launch"""
AWAY_US = 1000.0
"""a host that launches nothing for so long was busy with something else than launching"""
SHORT_KERNEL_US = 10.0
"""TraceLens flags kernels under it"""

ALARM = 0.05
"""idle, blocked or waiting time under it is nobody's bottleneck (TraceLens, Megatron-Bridge: 5%)"""
MEMORY_BOUND = 0.6
"""of a step in elementwise, normalisation and optimizer kernels, before bandwidth is named"""
FUSION_RECOVERS = 0.15
"""of their time: the lowest of TraceLens's 15, 30 and 45% for what has no model"""
NEAR_ROOF = 0.6
"""of the measured bandwidth, from which a kernel is called bound by it"""
BOUND_SHARE = 0.4
"""of the kernels' time bound by bandwidth, where shapes tell, before it is named"""
INEFFICIENT = 0.6
"""of what the machine reaches at their shapes: products and attention below it are named"""
WELL = 0.9
"""of what a machine reaches at a shape that a step may be expected to reach, beside other work"""
WORTH_TELLING = 0.001
"""smaller shares are left out of the evidence"""
SLOW_PRODUCT_RECOVERS = 0.75
"""of a float32 product's time: tensor cores have 7 to 8 times the rate (A100, H100 datasheets)"""
BOTH_WAYS = 0.25
"""of host copies leaving the device, before they are called offload rather than input"""
SAME_RANK = 0.8
"""of collectives that wait for one and the same rank, before it is named"""

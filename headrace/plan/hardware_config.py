"""Say what the machines of a run cost, and how often they fail."""

from pydantic import Field

from headrace.core.strict import Strict


class HardwareConfig(Strict):
    """Say what the machines cost, and how often they fail."""

    dollars_per_hour: float | None = Field(default=None, ge=0, le=1e9)
    """Price of all devices of the run in dollars an hour; without it `dollars` is null."""
    network_gb_per_s: float | None = Field(default=None, gt=0, le=1e5)
    """GB/s that each GPU sends to other hosts at most, as 50 of a port of 400 Gb/s a GPU. Left
    open, nothing is assumed of a network, and no time of several hosts is predicted."""
    failures_per_1000_gpu_days: float | None = Field(default=None, ge=0, le=1e6)
    """Failures that end the run, of 1,000 GPUs a day, by which predictions lengthen it. Left open,
    GPUs fail as those of Llama 3 did: 0.47."""
    restart_minutes: float = Field(default=10.0, ge=0, le=1e6)
    """Minutes from a failure until steps are trained again. Under 4 are published (Olmo Hybrid)."""

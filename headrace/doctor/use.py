"""Price the work of one step by the rates of the device that the run was on."""

from collections.abc import Mapping
from dataclasses import dataclass

from headrace.predict.prediction import Prediction

COMPUTES, OTHER = ("product", "attention"), ("collective", "wait", "host")
"""Kinds of work that compute, and that neither compute nor move bytes: what other ranks take, and
what Python does between operations on a CPU."""
NO_PLAN = "no plan is known of this loop"
"""The reason why nothing is predicted of a loop that is not Headrace's."""


@dataclass(frozen=True)
class Use:
    """Hold what the work of one step takes of a device, by its rates.

    Args:
        computes_s: seconds of matmuls and attention; None where no time is predicted.
        moves_s: seconds of work that only moves bytes, the update included.
        host_s: seconds that the host takes to launch all of it, and does besides.
        peak: share of the device's peak FLOPs at the run's precision; None where it is unavailable.
        rates: where the rates are from, in words.
        unknown: why no time is predicted.
    """

    computes_s: float | None = None
    moves_s: float = 0.0
    host_s: float = 0.0
    peak: float | None = None
    rates: str = ""
    unknown: str = NO_PLAN

    @staticmethod
    def of(prediction: Prediction, peak: float | None = None) -> "Use":
        """Read it from the prediction of a run's own plan.

        Args:
            prediction: what is predicted of the plan.
            peak: share of the device's peak that the run reached.
        """
        if prediction.time.step_s is None:
            return Use(peak=peak, unknown=prediction.time.unknown)
        work_s: Mapping[str, float] = prediction.time.work_s
        kind_of = {name: name.partition(",")[0] for name in work_s}
        computes_s = sum(work_s[name] for name, kind in kind_of.items() if kind in COMPUTES)
        other_s = sum(work_s[name] for name, kind in kind_of.items() if kind in OTHER)
        sources = {"probes": "measured by probes", "datasheet": "assumed from its datasheet"}
        source = sources.get(prediction.rates.source, prediction.rates.source)
        return Use(
            computes_s,
            sum(work_s.values()) - computes_s - other_s,
            prediction.time.host_s,
            peak,
            f"rates of {prediction.rates.device} {source}",
            "",
        )

    @property
    def device_s(self) -> float | None:
        """Return the seconds of all work on the device."""
        return None if self.computes_s is None else self.computes_s + self.moves_s


UNKNOWN = Use()
"""The use of a device by a loop of which nothing is known."""

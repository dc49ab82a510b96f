"""Read a budget and a number of tokens as they are typed."""

import math
import re
from dataclasses import dataclass
from typing import Literal

from headrace.core.errors import ConfigError, alike
from headrace.core.limits import MOST
from headrace.plan.plan import Plan

Unit = Literal["usd", "gpu-hours", "flops"]
WRITTEN = re.compile(r"\$?\s*([0-9.]+(?:e[+-]?[0-9]+)?)\s*([a-z -]*)", re.IGNORECASE)
UNITS: dict[str, tuple[Unit, float]] = {
    "usd": ("usd", 1),
    "dollars": ("usd", 1),
    "gpu-hours": ("gpu-hours", 1),
    "gpu-hour": ("gpu-hours", 1),
    "gpu-minutes": ("gpu-hours", 1 / 60),
    "gpu-days": ("gpu-hours", 24),
    "flops": ("flops", 1),
    "flop": ("flops", 1),
}
"""Word behind the number of a budget -> its unit, and how many of that unit it is."""
LARGEST: dict[Unit, float] = {"usd": 1e12, "gpu-hours": 1e11, "flops": 1e30}
"""Largest budget of each unit: a thousand times those of the largest runs. More has batches and
lengths that no plan can say."""
SCALES = {"": 1, "k": 1e3, "m": 1e6, "b": 1e9, "t": 1e12}
"""Letter behind a number of tokens -> its factor."""


@dataclass(frozen=True)
class Budget:
    """Hold what may be spent: an amount in its unit."""

    amount: float
    unit: Unit

    @classmethod
    def read(cls, text: str) -> "Budget":
        """Return the budget that a text names, as in 100usd, 8gpu-hours or 3e19flops.

        Raises:
            ConfigError: it names none, with the nearest that is one.
        """
        written = WRITTEN.fullmatch(text.strip())
        word = re.sub(r"[ -]+", "-", written[2].strip().lower()) if written else ""
        amount = _number(written[1]) if written else 0.0
        if text.strip()[:1] == "$":
            word = "usd" if not word or UNITS.get(word, ("",))[0] == "usd" else "$"
        near = alike(word, UNITS) or "gpu-hours"
        unit, factor = UNITS[near]
        if word not in UNITS or not 0 < amount * factor <= LARGEST[unit]:
            kept = min(amount, LARGEST[unit] / factor) if 0 < amount < math.inf else 1
            raise ConfigError(
                f"--budget {text!r} is no amount of money, GPU hours or FLOPs, such as 100usd, "
                "8gpu-hours or 3e19flops, up to 1e12usd, 1e11gpu-hours or 1e30flops",
                f"--budget {kept:g}{near}".replace("e+", "e"),
            )
        return cls(amount * factor, unit)

    def __str__(self) -> str:
        """Return the budget as it is typed."""
        return f"{self.amount:.6g}{self.unit}".replace("e+0", "e").replace("e+", "e")

    def seconds(self, plan: Plan) -> float:
        """Return the seconds on the clock that it buys; endless where it is FLOPs.

        Raises:
            ConfigError: it is money, and the plan has no price.
        """
        if self.unit == "flops":
            return math.inf
        if self.unit == "gpu-hours":
            return 3600 * self.amount / plan.mesh.ranks
        if not (price := plan.hardware.dollars_per_hour):
            raise ConfigError(
                f"a budget of {self} buys hours by the price of an hour of all devices, and the "
                "plan has no hardware.dollars_per_hour",
                "hardware.dollars_per_hour=2",
            )
        return 3600 * self.amount / price


def read_tokens(text: str) -> float:
    """Return the number of tokens that a text names, as in 300M, 2e9 or 1.5B.

    Raises:
        ConfigError: it names none.
    """
    written = WRITTEN.fullmatch(text.strip())
    count = _number(written[1]) * SCALES.get(written[2].strip().lower(), 0) if written else 0.0
    count *= "$" not in text
    if not 1 <= count <= MOST:
        raise ConfigError(
            f"--data {text!r} is no number of tokens from 1 to {MOST:.0e}, such as 300M or 1.5B",
            "--data 1B",
        )
    return count


def _number(text: str) -> float:
    """Return a number, or 0 where the text is none."""
    try:
        return float(text)
    except ValueError:
        return 0.0

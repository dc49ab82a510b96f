"""Turn far positions slower, so that a model of short rows reads long ones.

Rotary embedding turns each pair of features by position x frequency. Past the rows of pretraining
slow pairs reach angles that no layer has seen, and the loss jumps. These rules give every pair a
lower frequency, so that `factor` times longer rows stay within the known angles; a short
fine-tuning on long rows then settles the model. With lambda a pair's wavelength in tokens, s =
`factor` and L = `original_length`:

    linear   every frequency / s: position interpolation; near tokens blur together
    ntk      theta x s^(K / (K - 2)): the slowest pair turns s times slower, the fastest as before
    yarn     a ramp over pairs from unchanged (L / lambda > `beta_fast`) to / s (< `beta_slow`), and
             cosine and sine x (0.1 ln s + 1), which sharpens attention over more keys
    llama3   / s where lambda > L / `low_frequency_factor`, unchanged where it is less than
             L / `high_frequency_factor`, smooth between: the rule of Llama 3.1

The ramp runs over whole pairs, as the paper's code and transformers have it, so an exported model
computes the same there. Cost: nothing, since the table of angles is made anyway. Left out: dynamic
NTK, whose angles follow the length of the row that is read, and LongRoPE's searched factors.
Sources: arXiv 2306.15595 (linear); arXiv 2309.00071 (yarn, and ntk in section 3.1);
`apply_scaling` of meta-llama/llama-models (llama3).

Shapes: B rows, T tokens, K features of a head, P = K / 2 pairs.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import Remedy, mend
from headrace.costs.ledger import Ledger
from headrace.model.position import RotaryPosition, Rotation
from headrace.plan.technique import (
    Card,
    Context,
    Doubt,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

CHANGED = 1e-5
"""Relative change of a frequency that is more than rounding."""


class ScaledRope(RotaryPosition):
    """Rotary embedding with frequencies that follow one of the rules does the rotation.

    Args:
        config: the model.
        rule: the technique, whose knobs the rules read.
        original: tokens of a row that the model knows.
    """

    def __init__(self, config: ModelConfig, rule: "Yarn", original: int) -> None:
        super().__init__(config)
        self.rule, self.original = rule, original

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of each feature pair, fp32 [P]."""
        plain_P, factor = super().frequencies(device), self.rule.factor
        if self.rule.kind == "linear":
            return plain_P / factor
        if self.rule.kind == "ntk":
            pair_P = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
            return self.stretched_theta ** (-pair_P / self.head_dim)
        kept_P = self._ramp(device) if self.rule.kind == "yarn" else self._smooth(plain_P)
        return plain_P * kept_P + plain_P / factor * (1 - kept_P)

    def prepare(self, positions_BT: Tensor) -> Rotation:
        """Return the angles of `positions_BT`; YaRN's temperature stands in cosine and sine."""
        cos, sin = super().prepare(positions_BT)
        return Rotation(cos * self.temperature, sin * self.temperature)

    @property
    def temperature(self) -> float:
        """Return what queries and keys are multiplied by; scores are by its square."""
        return 0.1 * math.log(self.rule.factor) + 1 if self.rule.kind == "yarn" else 1.0

    @property
    def stretched_theta(self) -> float:
        """Return the base with which the slowest pair rotates `factor` times slower."""
        return self.theta * self.rule.factor ** (self.head_dim / (self.head_dim - 2))

    def config_fields(self) -> dict[str, Any]:
        """Return transformers' fields; a base change is another `rope_theta` and no scaling.

        Releases of transformers 4 take YaRN's factor from the longest row over the original one.
        """
        rule = self.rule
        if rule.kind == "ntk":
            return {"rope_theta": self.stretched_theta}
        scaling: dict[str, Any] = {"rope_type": rule.kind, "factor": rule.factor}
        if rule.kind == "linear":
            return {"rope_scaling": scaling}
        scaling["original_max_position_embeddings"] = self.original
        if rule.kind == "llama3":
            scaling["low_freq_factor"] = rule.low_frequency_factor
            scaling["high_freq_factor"] = rule.high_frequency_factor
            return {"rope_scaling": scaling}
        scaling |= {"beta_fast": rule.beta_fast, "beta_slow": rule.beta_slow}
        scaling["attention_factor"] = self.temperature
        longest = round(rule.factor * self.original)
        return {"rope_scaling": scaling, "max_position_embeddings": longest}

    def _ramp(self, device: torch.device) -> Tensor:
        """Return YaRN's share of the unchanged frequency, [P]: 1 for fast pairs, 0 for slow."""
        first = max(math.floor(self._pair_of(self.rule.beta_fast)), 0)
        last = min(math.ceil(self._pair_of(self.rule.beta_slow)), self.head_dim - 1)
        place_P = torch.arange(self.head_dim // 2, device=device, dtype=torch.float32)
        # A ramp of no length would divide by zero; the width is the paper's code's.
        return 1 - ((place_P - first) / (max(last - first, 1e-3))).clamp(0, 1)

    def _pair_of(self, rotations: float) -> float:
        """Return the pair, as a fraction, that makes so many rotations in the original rows."""
        wavelengths = self.original / (2 * math.pi * rotations)
        return self.head_dim * math.log(wavelengths) / (2 * math.log(self.theta))

    def _smooth(self, plain_P: Tensor) -> Tensor:
        """Return Llama 3.1's share of the unchanged frequency, [P]."""
        low, high = self.rule.low_frequency_factor, self.rule.high_frequency_factor
        rotations_P = self.original * plain_P / (2 * math.pi)
        return ((rotations_P - low) / (high - low)).clamp(0, 1)


MOST = 1e6
"""Largest value of its rotations and factors."""


class Yarn(Technique[Build]):
    """Turn far positions slower, so that a model of short rows reads long ones."""

    kind: Literal["yarn", "ntk", "linear", "llama3"] = "yarn"
    """The rule: YaRN, a larger base, position interpolation, or Llama 3.1's."""
    factor: float = Field(default=4.0, gt=1, le=1e6)
    """How many times longer rows become; tuner range 2 to 32."""
    original_length: int = Field(default=0, ge=0, le=1 << 24)
    """Tokens of a row that the model knows; 0 is data.sequence_length / factor."""
    beta_fast: float = Field(default=32.0, gt=0, le=MOST)
    """yarn: pairs with more turns than this within the original rows stay as they are."""
    beta_slow: float = Field(default=1.0, gt=0, le=MOST)
    """yarn: pairs with fewer turns than this turn `factor` times slower."""
    low_frequency_factor: float = Field(default=1.0, gt=0, le=MOST)
    """llama3: pairs with fewer turns than this within the original rows turn slower by `factor`."""
    high_frequency_factor: float = Field(default=4.0, gt=0, le=MOST)
    """llama3: pairs with more turns than this stay as they are."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.position",)
    equality: ClassVar = "learning"
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys=(
            "rows longer than those of pretraining",
            "YaRN needs a tenth of the tokens and 2.5x fewer steps than earlier methods "
            "(arXiv 2309.00071, abstract)",
        ),
        costs=(
            "no memory (derived)",
            "a little of what short rows had (arXiv 2306.15595, section 3.4)",
        ),
        helps="going on from a pretrained model with longer rows",
        hurts="training from nothing, where model.rope_theta can be chosen for the row",
        source="arXiv 2309.00071; arXiv 2306.15595; meta-llama/llama-models",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support rotary embedding with pairs that the rule can slow."""
        if context.plan is None:
            return Supported()
        model, name = context.plan.model, self.name()
        if model.position != "rope":
            return Unsupported(
                f"model.position = {model.position!r} has no rotation to scale",
                mend("model.position=rope"),
            )
        for high, low in (
            ("beta_fast", "beta_slow"),
            ("high_frequency_factor", "low_frequency_factor"),
        ):
            if getattr(self, high) <= getattr(self, low):
                return Unsupported(
                    f"{high} = {getattr(self, high):g} must be more than {low} = "
                    f"{getattr(self, low):g}",
                    mend(f"techniques.{name}.{high}={2 * getattr(self, low):g}")
                    if 2 * getattr(self, low) <= MOST
                    else mend(f"techniques.{name}.{low}={getattr(self, high) / 2:g}"),
                )
        if self.kind == "ntk" and model.resolved_head_dim < 4:
            return Unsupported("a head with one pair has no slowest pair", mend("model.head_dim=4"))
        if model.rope_theta <= 1:
            return Unsupported(
                f"model.rope_theta = {model.rope_theta:g} makes no pair turn slower than another",
                mend("model.rope_theta=10000"),
            )
        return self._within(model, self.original(context.plan))

    def _within(self, model: ModelConfig, original: int) -> Supported | Unsupported:
        """Return whether the rule slows a pair, and original rows are long enough for rotations."""
        name, shortest = self.name(), math.ceil(2 * math.pi * self.beta_slow)
        if self.kind == "yarn" and original < shortest:
            return Unsupported(
                f"in rows of {original} tokens no pair turns beta_slow = {self.beta_slow:g} times, "
                f"which takes {shortest}",
                mend(f"techniques.{name}.original_length={shortest}"),
            )
        rope = ScaledRope(model, self, original)
        if float(_slowing(rope).max()) <= 1 + CHANGED:
            slowest = RotaryPosition(model).frequencies(torch.device("cpu"))[-1]
            longest = 2 * math.pi / float(slowest)
            return Unsupported(
                f"no pair is slowed: the longest wavelength is {longest:.0f} tokens and the "
                f"original rows have {original}",
                mend(f"techniques.{name}.original_length={max(1, int(longest / 4))}"),
            )
        return Supported()

    def original(self, plan: Any) -> int:
        """Return the tokens of a row that the model knows."""
        return self.original_length or max(1, round(plan.data.sequence_length / self.factor))

    def doubt(self, plan: Any) -> Doubt | None:
        """Warn that random weights have learned no shorter rows to stretch."""
        if plan.model.pretrained:
            return None
        length, theta = plan.data.sequence_length, plan.model.rope_theta
        return Doubt(
            f"{self.name()} stretches what a model of short rows has learned, and the weights of "
            f"this run are random: they learn rows of {length} tokens from the start",
            Remedy(text="model.pretrained=FOLDER,")
            | mend(
                f"-{self.name()}",
                text=f"--without {self.name()} and model.rope_theta for the row (it is {theta:g})",
            ),
        )

    def predict(self, ledger: Ledger) -> Ledger:
        """Leave memory and work as they are."""
        return ledger

    def apply(self, build: Build) -> None:
        """Fill the rotation."""
        original = self.original(build.plan)
        build.parts.position = lambda config: ScaledRope(config, self, original)

    def active(self, build: Build) -> Evidence:
        """Read how much slower than with model.rope_theta the built model's pairs rotate."""
        slower_P = _slowing(build.model.position)
        slowed = int((slower_P > 1 + CHANGED).sum())
        numbers: Mapping[str, float] = {
            "pairs": len(slower_P),
            "slowed": slowed,
            "slowest": float(slower_P.max()),
            "temperature": _size(build.model.position),
        }
        return Evidence(
            active=slowed > 0 and float(slower_P.min()) > 1 - CHANGED,
            detail=f"{slowed} of {len(slower_P)} pairs turn slower, up to "
            f"{numbers['slowest']:.3g} times; queries and keys x {numbers['temperature']:.3g}",
            numbers=numbers,
        )


def _rotated(position: Any) -> Tensor | None:
    """Return what rotates queries and keys at position 1, complex [P]; None without rotation."""
    rotation = position.prepare(torch.ones(1, 1, dtype=torch.int64))
    return None if rotation is None else torch.complex(rotation.cos, rotation.sin).flatten()


def _slowing(position: Any) -> Tensor:
    """Return how many times slower than in plain RoPE of this base each pair rotates, [P]."""
    rotated_P = _rotated(position)
    if rotated_P is None:
        return torch.ones(1)
    return RotaryPosition.frequencies(position, rotated_P.device) / rotated_P.angle()


def _size(position: Any) -> float:
    """Return what a rotation multiplies queries and keys by beside rotating them."""
    rotated_P = _rotated(position)
    return 1.0 if rotated_P is None else float(rotated_P.abs().mean())

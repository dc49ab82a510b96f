"""Turn far positions slower, so that a model of short rows reads long ones.

Rotary embedding turns each pair of features by position x frequency. Past the rows of pretraining
slow pairs reach angles that no layer has seen, and the loss jumps. These rules give every pair a
lower frequency, so that `factor` times longer rows stay within the known angles; a short
fine-tuning on long rows then settles the model. With lambda a pair's wavelength in tokens, s =
`factor` and L = `original_length`:

    linear   every frequency / s: position interpolation; near tokens blur together
    ntk      theta x s^(K / (K - 2)): the slowest pair turns s times slower, the fastest as before
    dynamic  the same with s x n / L - (s - 1) in the place of s, for a document of n > L tokens:
             short ones turn as before, and each length by angles of its own
    yarn     a ramp over pairs from unchanged (L / lambda > `beta_fast`) to / s (< `beta_slow`), and
             cosine and sine x (0.1 ln s + 1), which sharpens attention over more keys
    llama3   / s where lambda > L / `low_frequency_factor`, unchanged where it is less than
             L / `high_frequency_factor`, smooth between: the rule of Llama 3.1

The ramp runs over whole pairs, as the paper's code and transformers have it, so an exported model
computes the same there. Cost: nothing, since the table of angles is made anyway. Left out:
LongRoPE's searched factors. Sources: arXiv 2306.15595 (linear); arXiv 2309.00071 (yarn, ntk in 3.1,
dynamic in 3.3); `apply_scaling` of meta-llama/llama-models (llama3); `dynamic` of transformers'
modeling_rope_utils.

Shapes: B rows, T tokens, K features of a head, P = K / 2 pairs.
"""

import math
from collections.abc import Mapping
from typing import Any, ClassVar, Literal

import torch
from pydantic import Field
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.model_config import ModelConfig, RopeScaling
from headrace.core.remedy import Remedy, mend
from headrace.costs.ledger import Ledger
from headrace.model.adapter import shape_of
from headrace.model.position import RotaryPosition, ScaledRope
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


MOST = 1e6
"""Largest value of its rotations and factors."""


class Yarn(Technique[Build]):
    """Turn far positions slower, so that a model of short rows reads long ones."""

    kind: Literal["yarn", "ntk", "dynamic", "linear", "llama3"] = "yarn"
    """The rule: YaRN, a larger base, one that grows with a document, position interpolation, or
    Llama 3.1's."""
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
        model, name = shape_of(context.plan.model), self.name()
        if model.position != "rope":
            return Unsupported(
                f"model.position = {model.position!r} has no rotation to scale",
                mend("model.position=rope"),
            )
        if model.rope_scaling.kind != "none":
            return Unsupported(
                f"the rotations of this model are slowed already: model.rope_scaling.kind = "
                f"{model.rope_scaling.kind!r}, factor {model.rope_scaling.factor:g}",
                mend(f"-{name}"),
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
        if self.kind in ("ntk", "dynamic") and model.resolved_head_dim < 4:
            return Unsupported("a head with one pair has no slowest pair", mend("model.head_dim=4"))
        if self.kind == "dynamic" and context.plan.mesh.context > 1:
            return Unsupported(
                f"a rank of mesh.context = {context.plan.mesh.context} has a part of a row, and "
                "kind = 'dynamic' turns by the length of the whole document",
                mend(f"techniques.{name}.kind=yarn").otherwise(context.whole("context")),
                RefusalKind.COMBINATION,
            )
        if model.rope_theta <= 1:
            return Unsupported(
                f"model.rope_theta = {model.rope_theta:g} makes no pair turn slower than another",
                mend("model.rope_theta=10000"),
            )
        length = context.plan.data.sequence_length
        return self._within(model, self.original(context.plan), length)

    def _within(self, model: ModelConfig, original: int, length: int) -> Supported | Unsupported:
        """Return whether the rule slows a pair, and original rows are long enough for rotations."""
        name, shortest = self.name(), math.ceil(2 * math.pi * self.beta_slow)
        if self.kind == "yarn" and original < shortest:
            return Unsupported(
                f"in rows of {original} tokens no pair turns beta_slow = {self.beta_slow:g} times, "
                f"which takes {shortest}",
                mend(f"techniques.{name}.original_length={shortest}"),
            )
        rope = ScaledRope(model, self.rule(original))
        if self.kind == "dynamic" and length <= original:
            return Unsupported(
                f"no pair is slowed: rows of {length} tokens are no longer than the original "
                f"{original}",
                mend(f"techniques.{name}.original_length={max(1, length // 2)}"),
            )
        if float(_slowing(rope, length).max()) <= 1 + CHANGED:
            slowest = RotaryPosition(model).frequencies(torch.device("cpu"))[-1]
            longest = 2 * math.pi / float(slowest)
            return Unsupported(
                f"no pair is slowed: the longest wavelength is {longest:.0f} tokens and the "
                f"original rows have {original}",
                mend(f"techniques.{name}.original_length={max(1, int(longest / 4))}"),
            )
        return Supported()

    def rule(self, original: int) -> RopeScaling:
        """Return the rule for a model that knows rows of `original` tokens."""
        knobs = {key: value for key, value in self if key in RopeScaling.model_fields}
        return RopeScaling(**{**knobs, "original_length": original})

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
        rule = self.rule(self.original(build.plan))
        build.parts.position = lambda config: ScaledRope(config, rule)

    def active(self, build: Build) -> Evidence:
        """Read how much slower than with model.rope_theta the built model's pairs rotate."""
        length = build.plan.data.sequence_length
        slower_P = _slowing(build.model.position, length)
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


def _rotated(position: Any, length: int) -> Tensor | None:
    """Return what rotates queries and keys at position 1 of a row, complex [P]; None without it."""
    rotation = position.prepare(torch.tensor([[1, max(1, length - 1)]]))
    return None if rotation is None else torch.complex(rotation.cos, rotation.sin)[0, 0, 0]


def _slowing(position: Any, length: int) -> Tensor:
    """Return how many times slower than in plain RoPE each pair rotates in such a row, [P]."""
    rotated_P = _rotated(position, length)
    if rotated_P is None:
        return torch.ones(1)
    return RotaryPosition.frequencies(position, rotated_P.device) / rotated_P.angle()


def _size(position: Any) -> float:
    """Return what a rotation multiplies queries and keys by beside rotating them."""
    rotated_P = _rotated(position, 1)
    return 1.0 if rotated_P is None else float(rotated_P.abs().mean())

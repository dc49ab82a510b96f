"""Give tokens their place by a rotation of queries and keys, a learned table, or nothing.

Every filler has the same two methods, so the decoder has no branch: `embed` may add to the
embedding once, `prepare` makes what `rotate` needs, once per forward and shared by all layers.
Nothing is kept in buffers: tables follow the batch's own positions, in fp32.

Shapes: B rows, T tokens, H heads, K features of a head, D features of the model.
"""

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from headrace.core.model_config import ModelConfig, RopeScaling

Normalise = Callable[[Tensor], Tensor]
"""What is done to each head before it is turned: the mixer's norm of queries or of keys."""


def as_is(x_BTHK: Tensor) -> Tensor:
    """Return the input: no norm."""
    return x_BTHK


class Rotation(NamedTuple):
    """A rotation holds cosine and sine of every position's angles, fp32 [B, T, 1, K/2]."""

    cos: Tensor
    sin: Tensor

    def rotate(self, x_BTHK: Tensor, norm: Normalise = as_is) -> Tensor:
        """Rotate `norm(x_BTHK)` by its positions' angles in fp32; return it in its own dtype."""
        x_BTHK = norm(x_BTHK)
        a, b, cos, sin = *x_BTHK.float().chunk(2, dim=-1), self.cos, self.sin
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).type_as(x_BTHK)


class NoPosition(nn.Module):
    """Order comes from the causal mask alone (arXiv 2305.19466)."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Return `x_BTD` unchanged."""
        return x_BTD

    def prepare(self, positions_BT: Tensor) -> Rotation | None:
        """Return None: there is nothing to prepare."""
        return None

    def config_fields(self) -> dict[str, Any]:
        """Return the fields of transformers' config.json that `ModelConfig` does not give."""
        return {}


class LearnedPosition(NoPosition):
    """Add GPT-2's learned table of positions to the embedding."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.weight = nn.Parameter(torch.empty(config.context, config.dim))

    def embed(self, x_BTD: Tensor, positions_BT: Tensor) -> Tensor:
        """Return `x_BTD` plus each position's row."""
        return x_BTD + nn.functional.embedding(positions_BT, self.weight)


class RotaryPosition(NoPosition):
    """Rotary embedding (arXiv 2104.09864), halves convention as Llama and Qwen have it."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.theta, self.head_dim = config.rope_theta, config.resolved_head_dim

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of each feature pair, fp32 [K/2]; scalings override it."""
        pair = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
        return self.theta ** (-pair / self.head_dim)

    def prepare(self, positions_BT: Tensor) -> Rotation:
        """Return the angles of `positions_BT`."""
        angle = positions_BT[..., None, None].float() * self.frequencies(positions_BT.device)
        return Rotation(angle.cos(), angle.sin())


class ScaledRope(RotaryPosition):
    """Rotary embedding with frequencies that follow a rule (techniques/attention/yarn says which).

    Those of `dynamic` follow from the length of the document that a token stands in, so that rows
    and documents beside it change nothing. transformers takes the longest row of a batch, which is
    the same for a row alone.

    Args:
        config: the model.
        rule: how they are slowed; the config's own without it.
    """

    def __init__(self, config: ModelConfig, rule: RopeScaling | None = None) -> None:
        super().__init__(config)
        self.rule = rule or config.rope_scaling
        self.original = self.rule.original_length

    def frequencies(self, device: torch.device) -> Tensor:
        """Return the angle per position of each feature pair, fp32 [P].

        Those of `dynamic` are the ones of documents that are no longer than the original rows.
        """
        plain_P, factor = super().frequencies(device), self.rule.factor
        if self.rule.kind == "dynamic":
            return plain_P
        if self.rule.kind == "linear":
            return plain_P / factor
        if self.rule.kind == "ntk":
            pair_P = torch.arange(0, self.head_dim, 2, device=device, dtype=torch.float32)
            return self.stretched_theta ** (-pair_P / self.head_dim)
        kept_P = self._ramp(device) if self.rule.kind == "yarn" else self._smooth(plain_P)
        return plain_P * kept_P + plain_P / factor * (1 - kept_P)

    def prepare(self, positions_BT: Tensor) -> Rotation:
        """Return the angles of `positions_BT`; YaRN's temperature stands in cosine and sine."""
        if self.rule.kind == "dynamic":
            return self._by_length(positions_BT)
        cos, sin = super().prepare(positions_BT)
        return Rotation(cos * self.temperature, sin * self.temperature)

    def _by_length(self, positions_BT: Tensor) -> Rotation:
        """Return the angles by the length of each token's document; the host waits for nothing.

        A document begins at each position 0. Its length is one more than its last position: a
        single token behind a cache has a document of all tokens before it.
        """
        document_BT = (positions_BT == 0).cumsum(1)
        last_BD = torch.zeros_like(positions_BT[:, :1]).repeat(1, positions_BT.size(1) + 1)
        last_BD = last_BD.scatter_reduce(1, document_BT, positions_BT, "amax")
        length_BT = last_BD.gather(1, document_BT).float() + 1
        factor, K = self.rule.factor, self.head_dim
        beyond_BT = (factor * length_BT / self.original - (factor - 1)).clamp(min=1)
        theta_BT = self.theta * beyond_BT ** (K / (K - 2))
        pair_P = torch.arange(0, K, 2, device=positions_BT.device, dtype=torch.float32)
        frequency_BTP = theta_BT[..., None] ** (-pair_P / K)
        angle = positions_BT[..., None, None].float() * frequency_BTP[:, :, None]
        return Rotation(angle.cos(), angle.sin())

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
        if rule.kind == "dynamic":  # whose original rows are the config's longest
            return {"rope_scaling": scaling, "max_position_embeddings": self.original}
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


class LocalRotaryPosition(RotaryPosition):
    """The rotation of the layers that have the window, where they have one of their own."""

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.theta = config.local_rope_theta


def rope(config: ModelConfig) -> RotaryPosition:
    """Return the rotation that `model.*` describes."""
    scaled = config.rope_scaling.kind != "none"
    return ScaledRope(config) if scaled else RotaryPosition(config)


def rotate(x_BTHK: Tensor, rotation: Rotation | None, norm: Normalise = as_is) -> Tensor:
    """Rotate `norm(x_BTHK)` by `rotation`, in its own dtype; None rotates nothing.

    The norm is handed over and not applied before, so that one kernel may do both.
    """
    return norm(x_BTHK) if rotation is None else rotation.rotate(x_BTHK, norm)


POSITIONS = {"rope": rope, "learned": LearnedPosition, "none": NoPosition}

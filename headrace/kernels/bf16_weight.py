"""A weight of 16 bits learns in 32: by the bits that bf16 leaves out, or by stochastic rounding.

bf16 is the upper half of an fp32 number. An update of a weight is mostly smaller than half of
bf16's last place, so a weight that is rounded to the nearest after every update stands still. Two
remedies are here:

- *the rest*: the difference between the fp32 number and the nearest bf16 number fits in 16 bits,
  since the difference of their bits does. Weight and rest together are the fp32 number exactly, in
  4 bytes. Apex's distributed optimizers keep such remainders.
- *stochastic rounding*: a number is rounded up with a probability equal to the share of the last
  place that bf16 cuts off, so the weight is right on average (arXiv 2010.06192). A number that bf16
  represents stays as it is.

The noise is a hash of keys and of the element's place in the whole matrix, not a generator's next
number: any cut over ranks, any resume and both devices round alike.

Shapes: R rows, C columns.
"""

import hashlib

import torch
from torch import Tensor

_HALF = 1 << 15
MIXERS = (0x7FEB352D, 0x846CA68B - (1 << 32))
"""Multipliers of a 32-bit hash with little bias (Wellons, "hash prospector"), as int32."""
STEPS = (0x9E3779B1 - (1 << 32), 0x85EBCA77 - (1 << 32))
"""Odd numbers (xxHash's primes, as int32), so that no two steps have the same keys."""


def joined(weight: Tensor, rest: Tensor | None) -> Tensor:
    """Return the fp32 numbers that bf16 `weight` and int16 `rest` hold together.

    Without a rest they are the weight's own numbers.
    """
    if rest is None:
        return weight.float()
    return ((weight.view(torch.int16).int() << 16) + rest.int()).view(torch.float32)


def split_(weight: Tensor, rest: Tensor, values: Tensor) -> None:
    """Write fp32 `values` into bf16 `weight`, rounded to the nearest, and int16 `rest`.

    Half a unit is rounded away from zero.
    """
    bits = values.view(torch.int32)
    upper = (bits + _HALF) >> 16
    rest.copy_(bits - (upper << 16))
    weight.copy_(upper.to(torch.int16).view(torch.bfloat16))


def round_(weight: Tensor, values: Tensor, noise: Tensor) -> None:
    """Write fp32 `values` into bf16 `weight`, away from zero where noise and cut-off bits carry.

    Args:
        weight: bf16, filled in place.
        values: fp32.
        noise: int32, uniform in [0, 65536).
    """
    upper = (values.view(torch.int32) + noise) >> 16
    weight.copy_(upper.to(torch.int16).view(torch.bfloat16))


def noise(rows_R: Tensor, columns_C: Tensor, keys_2: Tensor) -> Tensor:
    """Return numbers in [0, 65536) for the elements at `rows_R` + `columns_C`, int32 [R, C]."""
    x_RC = (rows_R[:, None] + columns_C) ^ keys_2[0]
    x_RC = (x_RC ^ ((x_RC >> 16) & 0xFFFF)) * MIXERS[0]
    x_RC = x_RC ^ keys_2[1]
    x_RC = (x_RC ^ ((x_RC >> 15) & 0x1FFFF)) * MIXERS[1]
    return (x_RC >> 16) & 0xFFFF


def round_with_noise_(
    weight_RC: Tensor, values_RC: Tensor, rows_R: Tensor, columns_C: Tensor, keys_2: Tensor
) -> None:
    """Round stochastically: `round_` with `noise`, in one function that a compiler fuses."""
    round_(weight_RC, values_RC, noise(rows_R, columns_C, keys_2))


def keys_of(seed: int, name: str, device: torch.device) -> Tensor:
    """Return the keys that make the noise of the matrix `name` its own, int32 [2]."""
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    own = [int.from_bytes(digest[i : i + 4], "little", signed=True) for i in (0, 4)]
    return torch.tensor(own, dtype=torch.int32, device=device)


def keys_at(own_2: Tensor, step: Tensor) -> Tensor:
    """Return the keys of a matrix at a step, int32 [2].

    Args:
        own_2: the matrix's own keys, from `keys_of`.
        step: a whole number on the device.
    """
    whole = step.to(torch.int32)
    return own_2 ^ torch.stack([whole * odd for odd in STEPS])


def places(
    offset: tuple[int, ...], local: tuple[int, ...], whole: tuple[int, ...], device: torch.device
) -> tuple[Tensor, Tensor]:
    """Return where the elements of a part stand in the whole matrix.

    Args:
        offset: where the part begins.
        local: its shape; all but the last dimension are rows.
        whole: the shape of the whole. Numbers wrap at 2^32 elements.
        device: where the answer lies.

    Returns:
        The place of each row's first element [R], and what each column adds to it [C]; int32.
    """
    rows_R, stride = torch.zeros(1, dtype=torch.long, device=device), 1
    for size in whole:
        stride *= size
    for start, count, size in list(zip(offset, local, whole, strict=True))[:-1]:
        stride //= size
        here = (start + torch.arange(count, device=device)) * stride
        rows_R = (rows_R[:, None] + here).flatten()
    columns_C = offset[-1] + torch.arange(local[-1], device=device)
    return rows_R.to(torch.int32), columns_C.to(torch.int32)

"""Guess what a value that a key does not take was meant to be: a number with a unit, a bare list.

Each guess is only offered once the key takes it.
"""

import re
from collections.abc import Iterator
from typing import Any

NUMBER = re.compile(r"[+-]?(?:[0-9][0-9_]*\.?[0-9_]*|\.[0-9]+)(?:[eE][+-]?[0-9]+)?")
THOUSANDS = re.compile(r"[+-]?[1-9][0-9]{0,2}(?:,[0-9]{3})+(?![0-9])")
DECIMAL_COMMA = re.compile(r"([+-]?[0-9]+),([0-9]+)")
COUNTS = {"": 1, "k": 10**3, "m": 10**6, "b": 10**9, "g": 10**9, "t": 10**12}
"""Suffix of a count, in lower case -> what it multiplies by."""
MINUTES = {"s": 1 / 60, "sec": 1 / 60, "m": 1, "min": 1, "h": 60, "hr": 60, "hours": 60, "d": 1440}
"""Suffix of a time, in lower case -> that unit in minutes."""
VALUES = {
    "gpu": "cuda",
    "nvidia": "cuda",
    "rocm": "cuda",
    "metal": "mps",
    "apple": "mps",
    "wsd": "warmup_stable_decay",
    "trapezoidal": "warmup_stable_decay",
    "linear": "cosine",
    "none": "constant",
    "fixed": "constant",
    "constant_with_warmup": "constant",
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu2",
    "rms": "rms_norm",
    "layernorm": "layer_norm",
    "ln": "layer_norm",
    "rotary": "rope",
    "absolute": "learned",
    "nope": "none",
    "float32": "fp32",
    "float": "fp32",
    "float16": "fp16",
    "half": "fp16",
    "bfloat16": "bf16",
    "tb": "tensorboard",
}
"""Word of other trainers -> the word that a key takes here."""


def choice(given: str, choices: list[str]) -> str | None:
    """Return the choice that a word of another trainer means; None where it means none."""
    meant = VALUES.get(given.lower().replace("-", "_"), "")
    return meant if meant in choices else None


def guesses(given: Any, name: str, *, share: bool = False) -> Iterator[Any]:
    """Yield what may have been meant by a value, the likeliest first.

    Args:
        given: the value that was written.
        name: the last part of its key, which tells minutes from counts.
        share: whether the key takes a share, which may have been written as so many of a hundred.
    """
    if isinstance(given, str):
        yield from _of_text(given.strip(), name)
        yield from _items(given)
    elif isinstance(given, int | float) and not isinstance(given, bool):
        if share and 1 < given <= 100:
            yield given / 100  # of a hundred
        if isinstance(given, float) and given.is_integer():
            yield int(given)


def _of_text(given: str, name: str) -> Iterator[Any]:
    """Yield the numbers that a text may mean: its first number by the unit behind it, then bare."""
    quantity = given.lstrip("$=~ ")
    if THOUSANDS.match(quantity):
        quantity = quantity.replace(",", "")
    elif comma := DECIMAL_COMMA.match(quantity):
        quantity = f"{comma[1]}.{comma[2]}{quantity[comma.end() :]}"
    match = NUMBER.match(quantity)
    if match is None:
        return
    number, unit = float(match[0].replace("_", "")), quantity[match.end() :].strip().lower()
    if unit == "%":
        yield number / 100
        return
    if name == "minutes" and unit in MINUTES:
        yield _plain(number * MINUTES[unit])
    elif unit[:1] in COUNTS:
        yield _plain(number * COUNTS[unit[:1]])
    yield _plain(number)


def _items(given: str) -> Iterator[list[Any]]:
    """Yield the list that a text spells without brackets or quotes: with numbers, then as words."""
    inner = given.strip().strip("[](){}")
    words = [word.strip(" '\"") for word in re.split(r"[,;\s]+", inner)]
    words = [word for word in words if word]
    if words and (len(words) > 1 or inner != given.strip()):
        yield [_number(word) for word in words]
        yield words


def _number(word: str) -> Any:
    match = NUMBER.fullmatch(word)
    return _plain(float(word.replace("_", ""))) if match else word


def _plain(number: float) -> float:
    """Return a number as an int where it is whole and has at most 64 bits."""
    return int(number) if number.is_integer() and abs(number) < 2**63 else number

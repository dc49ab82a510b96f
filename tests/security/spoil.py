"""Spoil a file: change its bytes, or put an odd value where one of its values is."""

import json
import random
import struct
import tomllib
from typing import Any

import tomli_w

ODD: tuple[Any, ...] = (
    *(None, True, False, 0, -1, 2**31, 2**63, 10**400, 1e308, float("nan"), float("inf"), -0.0),
    *("", "x", "\x00", "\ud800", "../../etc/passwd", "9" * 5000, "<script>alert(1)</script>"),
    *([], {}, [[]], [None], {"": None}, [1] * 70, {"a": {"b": {"c": []}}}, "e" * 3000, [{}]),
)
"""Values that stand in the place of one of a file."""
PIECES = (
    *(b"", b"\x00", b"\xff\xfe", b"\xef\xbb\xbf", b'"', b"\\", b"{", b"[" * 3000, b"]}", b"\n"),
    *(b"null", b"-1", b"1e999", b"9" * 400, b"NaN", b"\\ud800", b"<!--", b"{{", b"%}", b"\r\n\r\n"),
)
"""Bytes that are written over others, or between them."""


def spoil(raw: bytes, chance: random.Random) -> bytes:
    """Return the bytes of a file after one to three changes."""
    for _ in range(chance.randint(1, 3)):
        at = chance.randrange(len(raw) + 1)
        size = chance.choice((1, 1, 2, 4, 8, 64, 1000))
        what = chance.randrange(7)
        if what == 0:
            raw = raw[:at]
        elif what == 1 and raw:
            at = min(at, len(raw) - 1)
            raw = raw[:at] + bytes([raw[at] ^ (1 << chance.randrange(8))]) + raw[at + 1 :]
        elif what == 2:
            raw = raw[:at] + raw[at + size :]
        elif what == 3:
            raw = raw[:at] + raw[at : at + size] * chance.choice((2, 3, 20)) + raw[at + size :]
        elif what == 4:
            raw = raw[:at] + chance.randbytes(size) + raw[at + size :]
        elif what == 5:
            raw = raw[:at] + chance.choice(PIECES) + raw[at:]
        else:
            other = chance.choice(PIECES)
            raw = raw[:at] + other + raw[at + len(other) :]
    return raw


def spoil_value(value: Any, chance: random.Random) -> Any:
    """Return a tree of tables and lists in which one value is odd, absent, or renamed."""
    if isinstance(value, dict) and value:
        key = chance.choice([*value])
        what = chance.randrange(12)
        rest = {k: v for k, v in value.items() if k != key}
        if what == 0:
            return rest
        if what == 1:
            return {**rest, chance.choice(("", "x", key * 2, "__class__", "\x00")): value[key]}
        if what == 2:
            return {**value, key: chance.choice(ODD)}
        return {**value, key: spoil_value(value[key], chance)}
    if isinstance(value, list) and value and chance.randrange(4):
        at = chance.randrange(len(value))
        if not chance.randrange(6):
            return value[:at] + value[at + 1 :]
        return [*value[:at], spoil_value(value[at], chance), *value[at + 1 :]]
    return chance.choice(ODD)


def spoiled(raw: bytes, values: str, chance: random.Random) -> bytes:
    """Return a spoiled file: its bytes changed, or a value of it."""
    if not values or not chance.randrange(3):
        return spoil(raw, chance)
    if values == "jsonl":
        rows = raw.splitlines()
        at = chance.randrange(len(rows))
        rows[at] = _dumped(spoil_value(json.loads(rows[at]), chance))
        return b"\n".join(rows) + b"\n"
    if values == "toml":
        table = spoil_value(tomllib.loads(raw.decode()), chance)
        try:
            return tomli_w.dumps(table).encode()
        except (TypeError, AttributeError, ValueError, UnicodeEncodeError):
            return spoil(raw, chance)
    if values == "safetensors":
        (size,) = struct.unpack("<Q", raw[:8])
        head = _dumped(spoil_value(json.loads(raw[8 : 8 + size]), chance))
        return struct.pack("<Q", len(head)) + head + raw[8 + size :]
    return _dumped(spoil_value(json.loads(raw), chance))


def _dumped(value: Any) -> bytes:
    return json.dumps(value).encode()

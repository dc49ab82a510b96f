"""How a tokenizer.json spells its tokens, and the bytes of text that each stands for."""

import json
import re
from typing import Any

import numpy as np
import tokenizers

from headrace.core.errors import UnsupportedError
from headrace.core.remedy import mend


def _byte_alphabet() -> list[str]:
    """Return GPT-2's printable character for each byte, by byte."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return [chr(b) if b in printable else chr(next(rest)) for b in range(256)]


ALPHABET = _byte_alphabet()
BYTE_OF = {character: byte for byte, character in enumerate(ALPHABET)}
_SPELLED = dict(enumerate(ALPHABET))
_UNSPELLED = {ord(character): chr(byte) for character, byte in BYTE_OF.items()}


def spell(raw: bytes) -> str:
    """Return bytes as a byte-level token is spelled."""
    return raw.decode("latin-1").translate(_SPELLED)


def unspell(token: str) -> bytes:
    """Return the bytes of a byte-level token."""
    return token.translate(_UNSPELLED).encode("latin-1")


def spec_of(text: str) -> dict[str, Any]:
    """Return the object in a tokenizer.json, with the stages that it may leave out as None."""
    stages = dict.fromkeys(("normalizer", "pre_tokenizer", "decoder"))
    spec = {**stages, **json.loads(text)}
    return spec | {"added_tokens": spec.get("added_tokens") or []}


def steps_of(node: dict[str, Any] | None) -> list[dict[str, Any]]:
    """Return the steps of a normalizer, pre-tokenizer or decoder, sequences flattened."""
    if node is None:
        return []
    for key in ("normalizers", "pretokenizers", "decoders"):
        if node["type"] == "Sequence" and key in node:
            return [part for inner in node[key] for part in steps_of(inner)]
    return [node]


def token_bytes(spec: dict[str, Any], ids: dict[str, int], vocab: int, name: str) -> np.ndarray:
    """Return the UTF-8 bytes that each id stands for, int32 [vocab]; 0 for special ones.

    A token that spells a byte is that byte where bytes are a fallback, even if it is marked as
    special: text becomes it.

    Args:
        spec: the tokenizer.json.
        ids: every token's id.
        vocab: entries.
        name: what the file is called in messages.

    Raises:
        UnsupportedError: its tokens have no length in bytes.
    """
    added = {t["content"]: t.get("special", False) for t in spec["added_tokens"]}
    byte_level = is_byte_level(spec)
    if not byte_level and not spec["model"].get("byte_fallback"):
        raise UnsupportedError(
            f"{name} is a {spec['model']['type']} tokenizer, neither byte-level nor with byte "
            "fallback: its tokens have no exact length in bytes, so bits per byte could not be "
            "told",
            mend("data.tokenizer=bpe") | "a byte-level tokenizer.json (GPT-2, Llama 3, Qwen)",
        )
    out = np.zeros(vocab, dtype=np.int32)
    for token, i in ids.items():
        if not byte_level and re.fullmatch("<0x[0-9A-F]{2}>", token):
            out[i] = 1
        elif token in added:
            out[i] = 0 if added[token] else len(token.encode())
        elif byte_level:
            out[i] = len(token)
        else:
            out[i] = len(token.replace("\u2581", " ").encode())
    return out


def missing_bytes(spec: dict[str, Any], ids: dict[str, int]) -> list[int]:
    """Return the bytes of UTF-8 that no token stands for."""
    byte_level = is_byte_level(spec)
    every = set(bytes(range(0xC0))) | set(range(0xC2, 0xF5))  # what UTF-8 is made of
    spelled = {b: ALPHABET[b] if byte_level else f"<0x{b:02X}>" for b in every}
    return [b for b in sorted(every) if spelled[b] not in ids and not _ascii(b, ids, byte_level)]


def make_decoder(byte_level: bool, *, strip: bool) -> tokenizers.decoders.Decoder:
    """Return what turns tokens back into text, for a file that leaves it out."""
    decoders = tokenizers.decoders
    if byte_level:
        return decoders.ByteLevel()
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strip else steps)


def is_byte_level(spec: dict[str, Any]) -> bool:
    """Return whether tokens are spelled in GPT-2's alphabet of bytes."""
    stages = ("decoder", "pre_tokenizer", "normalizer")
    return any(step["type"] == "ByteLevel" for stage in stages for step in steps_of(spec[stage]))


def _ascii(byte: int, ids: dict[str, int], byte_level: bool) -> bool:
    """Return whether a character of one byte is a token itself, where bytes are a fallback."""
    return not byte_level and byte < 128 and chr(byte) in ids


def rewrites(spec: dict[str, Any]) -> bool:
    """Return whether a normalizer may change text, and not only the way in which it is spelled."""
    return any(
        part["type"] not in ("ByteLevel", "Prepend")
        and (part["type"], part.get("pattern")) != ("Replace", {"String": " "})
        for part in steps_of(spec["normalizer"])
    )

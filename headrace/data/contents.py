"""What the bytes of a file are, whatever its name says: compressed, a table, text, or none."""

import re
from typing import NamedTuple

from headrace.core.files import python

_PACKED = {
    "gzip": rb"\x1f\x8b\x08",
    "zstd": rb"\x28\xb5\x2f\xfd|[\x50-\x5f]\x2a\x4d\x18",
    "bz2": rb"BZh[1-9](1AY&SY|\x17rE8P\x90)",
    "xz": rb"\xfd7zXZ\x00",
}
"""How each kind of compressed file begins."""
PARQUET = b"PAR1"
_OTHERS = {
    b"%PDF-": "a PDF",
    b"PK\x03\x04": "a zip archive, as .docx, .xlsx and .epub are",
    b"\x89PNG\r\n": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF89a": "a GIF image",
    b"\x7fELF": "a program",
    b"SQLite format 3\x00": "a database of SQLite",
    b"ARROW1\x00\x00": "an Arrow file",
    b"7z\xbc\xaf\x27\x1c": "an archive of 7-Zip",
    b"\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1": "a document of an old Office",
    b"{\\rtf": "rich text",
}
"""How some files begin that hold text, if any, in a form of their own."""
_CONTROL = re.compile(rb"[\x00-\x08\x0e-\x1a\x1c-\x1f\x7f]")
_AS_WESTERN = 'lambda e: (e.object[e.start:e.end].decode("cp1252", "replace"), e.end)'
CONTROL_SHARE = 0.02
"""Share of control characters in bytes that are not UTF-8, above which they are no text. Random
bytes have 0.11; text in an encoding of one or two bytes a character has none."""
NEAR_BYTES = 1 << 12
"""Bytes on either side of a wrong one that are looked at."""
WESTERN_RUN = 1.5
"""Mean length of runs of bytes that are not UTF-8, up to which they are accents among letters. In
Cyrillic, Greek or East Asian encodings whole words are such a run."""


def packed_as(begins: bytes) -> str | None:
    """Return how a file is compressed by its first bytes; None where it is not."""
    return next((kind for kind, mark in _PACKED.items() if re.match(mark, begins)), None)


def other_kind(begins: bytes) -> str:
    """Return what a file is that begins so and is no plain text; "" where it may be."""
    return next((what for mark, what in _OTHERS.items() if begins.startswith(mark)), "")


def is_text(raw: bytes) -> bool:
    """Return whether bytes can be text in some encoding of one or more bytes a character."""
    return len(_CONTROL.findall(raw)) <= CONTROL_SHARE * len(raw)


class Guess(NamedTuple):
    """What bytes are that are not UTF-8.

    Args:
        description: in words.
        script: the filter that makes UTF-8 of them, a command; "" where none is known.
    """

    description: str
    script: str


def guess(raw: bytes, at: int) -> Guess:
    """Guess what a text is that is not UTF-8.

    Args:
        raw: its bytes.
        at: the first that is wrong.
    """
    near = raw[max(0, at - NEAR_BYTES) : at + NEAR_BYTES]
    if not is_text(near):
        count = len(_CONTROL.findall(near))
        return Guess(f"no text: {count:,} of {len(near):,} bytes there are control characters", "")
    text = near.decode(errors="surrogateescape")
    runs = re.findall("[\udc80-\udcff]+", text)
    others = len(re.findall("[^\x00-\x7f\udc80-\udcff]", text))
    if others >= len(runs):
        return Guess(
            "the text around it is UTF-8, so it is damaged; the command replaces such bytes with "
            "U+FFFD",
            _decoded('"replace"'),
        )
    if sum(map(len, runs)) <= WESTERN_RUN * len(runs):
        return Guess(
            "the command takes such bytes for Windows-1252, the older encoding of Western Europe, "
            "and leaves what is UTF-8 as it is",
            _decoded('"w"', f'codecs.register_error("w", {_AS_WESTERN}); '),
        )
    return Guess(
        "whole words are not, so it is in another encoding, which nothing tells; where you know "
        "it, as GB18030, SHIFT_JIS or CP1251, `iconv -f ENCODING -t UTF-8` makes UTF-8 of it",
        "",
    )


def _decoded(errors: str, before: str = "") -> str:
    """Return the shell filter that reads lines with the given handler of decoding errors."""
    script = (
        f"import codecs, sys; {before}sys.stdout.buffer.writelines("
        f'line.decode("utf-8", {errors}).encode() for line in sys.stdin.buffer)'
    )
    return python(script)

"""Say which characters make words, and which are the same letter: what texts are compared by.

Near-duplicates of text differ in case, punctuation and white space more than in words, so these go
before anything is compared. That buys more recall than further hash functions do.
"""

import unicodedata
from functools import cache

import numpy as np

LETTERS = 0x20000
"""Code points that the table covers; those above are ideographs, which stand alone."""
BREAK, SKIP = 0, 1
"""What the table holds for a character between words, and for one that is not seen."""
ALONE = 1 << 31
"""Is set where a character is a word of its own."""
UNSPACED = (
    (0x0E00, 0x0EFF),
    (0x1000, 0x109F),
    (0x1780, 0x17FF),
    (0x2E80, 0x2FDF),
    (0x3005, 0x3007),
    (0x3040, 0x312F),
    (0x31A0, 0x31FF),
    (0x3400, 0x4DBF),
    (0x4E00, 0x9FFF),
    (0xF900, 0xFAFF),
)
"""First and last code points of scripts that put no spaces between words: Thai, Lao, Burmese,
Khmer, and those of Chinese and Japanese. Each character of them counts as a word."""


@cache
def letters() -> np.ndarray:
    """Return what each code point below `LETTERS` stands for, as uint32 in their order.

    All callers have the same array, which they only read; making it takes 0.1 s.

    Letters, marks and digits stand for their case-folded form, formatting characters (a soft
    hyphen, a joiner) for nothing, all others for a break between words.
    """
    table = np.zeros(LETTERS, np.uint32)
    for code in range(LETTERS):
        character = chr(code)
        category = unicodedata.category(character)
        if category[0] in "LMN":
            folded = character.casefold()
            table[code] = ord(folded) if len(folded) == 1 else code
        elif category == "Cf":
            table[code] = SKIP
    for first, last in UNSPACED:
        part = table[first : last + 1]
        part[part > SKIP] |= ALONE
    return table


def encode_composed(text: str, raw: bytes) -> bytes:
    """Return a text as UTF-8 with its accents composed (NFC).

    Args:
        text: the text.
        raw: the text as UTF-8, which is returned where there is nothing to compose.
    """
    if text.isascii():
        return raw
    composed = unicodedata.normalize("NFC", text)
    return raw if composed is text else composed.encode()

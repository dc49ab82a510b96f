"""The script that a text is written in, by the blocks of Unicode: no model, no word lists."""

import numpy as np

NO_LETTERS = "no letters"
WINDOWS, WINDOW = 4, 1024
"""A long text is judged by this many windows, spread over it, of so many characters."""
_BLOCKS: tuple[tuple[int, int, str], ...] = (
    (0x41, 0x5B, "Latin"),
    (0x61, 0x7B, "Latin"),
    (0xAA, 0xAB, "Latin"),
    (0xBA, 0xBB, "Latin"),
    (0xC0, 0x250, "Latin"),
    (0x370, 0x400, "Greek"),
    (0x400, 0x530, "Cyrillic"),
    (0x530, 0x590, "Armenian"),
    (0x590, 0x600, "Hebrew"),
    (0x600, 0x780, "Arabic"),
    (0x780, 0x7C0, "Thaana"),
    (0x7C0, 0x800, "N'Ko"),
    (0x8A0, 0x900, "Arabic"),
    (0x900, 0x980, "Devanagari"),
    (0x980, 0xA00, "Bengali"),
    (0xA00, 0xA80, "Gurmukhi"),
    (0xA80, 0xB00, "Gujarati"),
    (0xB00, 0xB80, "Odia"),
    (0xB80, 0xC00, "Tamil"),
    (0xC00, 0xC80, "Telugu"),
    (0xC80, 0xD00, "Kannada"),
    (0xD00, 0xD80, "Malayalam"),
    (0xD80, 0xE00, "Sinhala"),
    (0xE00, 0xE80, "Thai"),
    (0xE80, 0xF00, "Lao"),
    (0xF00, 0x1000, "Tibetan"),
    (0x1000, 0x10A0, "Myanmar"),
    (0x10A0, 0x1100, "Georgian"),
    (0x1100, 0x1200, "Hangul"),
    (0x1200, 0x13A0, "Ethiopic"),
    (0x13A0, 0x1400, "Cherokee"),
    (0x1780, 0x1800, "Khmer"),
    (0x1800, 0x18B0, "Mongolian"),
    (0x1E00, 0x1F00, "Latin"),
    (0x1F00, 0x2000, "Greek"),
    (0x3040, 0x3100, "Japanese"),
    (0x3130, 0x3190, "Hangul"),
    (0x31F0, 0x3200, "Japanese"),
    (0x3400, 0x4DC0, "Han"),
    (0x4E00, 0xA000, "Han"),
    (0xAC00, 0xD7B0, "Hangul"),
    (0xF900, 0xFB00, "Han"),
    (0xFB50, 0xFE00, "Arabic"),
    (0xFE70, 0xFEFF, "Arabic"),
    (0xFF21, 0xFF3B, "Latin"),
    (0xFF41, 0xFF5B, "Latin"),
    (0xFF66, 0xFFA0, "Japanese"),
    (0x20000, 0x32000, "Han"),
)
"""(First code point, the one behind the last, script) of blocks of letters, Unicode 16."""
_NAMES = sorted({name for _, _, name in _BLOCKS})
_EDGES = np.array([edge for first, end, _ in _BLOCKS for edge in (first, end)], dtype=np.uint32)
_NUMBERS = np.array([_NAMES.index(name) for _, _, name in _BLOCKS])
KANA_SHARE = 0.05
"""Share of kana among kana and Han from which a text is Japanese; Chinese has none, and Japanese
mostly more than a third."""


def script_of(text: str) -> str:
    """Return the script of most letters of a text, or that it has none."""
    if len(text) > WINDOWS * WINDOW:
        apart = (len(text) - WINDOW) // (WINDOWS - 1)
        text = "".join(text[i * apart : i * apart + WINDOW] for i in range(WINDOWS))
    points = np.frombuffer(text.encode("utf-32-le"), dtype="<u4")
    place = np.searchsorted(_EDGES, points, side="right")
    letters = _NUMBERS[place[place % 2 == 1] // 2]
    counts = np.bincount(letters, minlength=len(_NAMES))
    if not len(letters):
        return NO_LETTERS
    kana, han = (counts[_NAMES.index(name)] for name in ("Japanese", "Han"))
    if kana >= KANA_SHARE * (kana + han):
        counts[_NAMES.index("Japanese")] += han
        counts[_NAMES.index("Han")] = 0
    return _NAMES[int(counts.argmax())]

"""What a tokenizer loses of a text, shown by example, and texts that no trainer chokes on."""

import re
import shlex
from collections.abc import Callable, Iterable, Iterator
from typing import Any, TypeVar

from headrace.core.errors import ConfigError
from headrace.core.files import python
from headrace.core.remedy import mend

Returned = TypeVar("Returned")
RUN_CHARACTERS = 512
"""Longer runs of blanks, or of anything else, are cut for the trainer: its time grows with the
square of a word."""
_LONG_RUN = re.compile(rf"\s{{{RUN_CHARACTERS + 1},}}|\S{{{RUN_CHARACTERS + 1},}}")
_STRIDE, _BLANK_STRIDE = 8, 64
"""Characters of which one is looked at for long runs, before all of them are; fewer for runs of
blanks, since few characters are blanks."""
_SAMPLED_BLANKS = re.compile(rf"\s{{{RUN_CHARACTERS // _BLANK_STRIDE}}}")
_PROBES = (
    *("a", " a", "  a", "a ", "a  b   c\t\td", "a\r\nb\n\n\nc\r", "\ta", "\n", "A Word", "1234567"),
    *("cafe\u0301 caf\u00e9", "\u212b \ufb01 \uff21 \u00b2", "\u00c4\u00d6 \u0130\u0131\u017f"),
    *("\u4e2d\u6587\u3002", "\u0939\u093f\u0928\u094d\u0926\u0940", "\u0627\u0644\u0639"),
    *("\ud55c\uad6d\uc5b4 \u1112\u1161\u11ab", "\u0e44\u0e17\u0e22", "\u05e9\u05c1"),
    *(
        "\U0001f469\u200d\U0001f680 \U0001f1e9\U0001f1ea",
        "\ufeffa\u00a0\u2028\u3000\u200b",
        "\x00\x01\x7f",
    ),
    *("it's , don't . a ! b ?", "a</w>b##c \u0120\u010a <0x41>", "x" * 300, " " * 300),
)


def guarded(call: Callable[[], Returned], what: str) -> Returned:
    """Return the call's result; what Rust raises, a panic included, becomes one error.

    Raises:
        ConfigError: the call failed.
    """
    try:
        return call()
    except (KeyboardInterrupt, SystemExit, MemoryError):
        raise
    except BaseException as error:  # a panic is no Exception
        raise ConfigError(f"{what}: {error}", mend("data.tokenizer=bpe")) from None


def _without_dropout(name: str) -> str:
    """Return the command that rewrites a tokenizer.json without dropout."""
    script = (
        "import json, sys; s = json.load(open(sys.argv[1])); s['model']['dropout'] = None; "
        "json.dump(s, open(sys.argv[1], 'w'))"
    )
    return python(script, shlex.quote(name))


def check_parts(spec: dict[str, Any], ids: dict[str, int], name: str) -> None:
    """Refuse vocabularies that are none, and encodings that differ from time to time.

    Raises:
        ConfigError: there is no token, two have one id, an id is far out, or dropout is on.
    """
    remedy = mend("data.tokenizer=bpe") | "mend the file"
    if not ids:
        raise ConfigError(f"{name} has an empty vocabulary", remedy)
    by_id: dict[int, str] = {}
    for token, i in ids.items():
        if i in by_id:
            raise ConfigError(f"{name} gives id {i} to {by_id[i]!r} and to {token!r}", remedy)
        by_id[i] = token
    if max(by_id) > 2 * len(ids) + 4096:
        raise ConfigError(
            f"{name} has {len(ids):,} tokens, and {by_id[max(by_id)]!r} has id {max(by_id):,}: "
            "embeddings for all ids between would never be used",
            remedy,
        )
    dropout = spec["model"].get("dropout")
    if dropout:
        raise ConfigError(
            f"{name} has dropout = {dropout}: the same text gets other ids each time",
            _without_dropout(name),
        )


def example_of_loss(
    returned: Callable[[list[str]], list[tuple[str, int]]], added_tokens: Iterable[str]
) -> str | None:
    """Say what a tokenizer loses of a probe text, or return None where all comes back.

    Args:
        returned: of each text, what its ids decode to and the bytes that they stand for.
        added_tokens: looked for as text, at its ends and between blanks.
    """
    sweep = [
        chr(c) for c in [*range(0x2581), *range(0x2582, 0xD800, 7), *range(0xE000, 0x30000, 61)]
    ]
    runs = ["".join(sweep[i : i + 64]) for i in range(0, len(sweep), 64)]
    probes = [*_PROBES, *(f"{t}a  {t}  a{t}" for t in added_tokens), *runs]
    for probe, (text, count) in zip(probes, returned(probes), strict=True):
        raw = len(probe.encode())
        if text != probe:
            return difference(probe, text)
        if count != raw:
            return f"{probe[:24]!a} has {raw} bytes, its tokens stand for {count}"
    return None


def difference(text: str, returned: str) -> str:
    """Show where a text comes back as another, in ASCII: composed accents look like others."""
    at = next((i for i, c in enumerate(text) if returned[i : i + 1] != c), len(text))
    shown, decoded = (t[max(0, at - 8) : at + 8] for t in (text, returned))
    return f"{shown!a} comes back as {decoded!a}"


def vanishing(missing: list[int]) -> str:
    """Say which bytes of UTF-8 have no token; "" where every one has."""
    if not missing:
        return ""
    names = " ".join(f"{b:02X}" for b in missing[:8]) + " ..." * (len(missing) > 8)
    characters = map(chr, [*range(0xD800), *range(0xE000, 0x110000, 0x1000)])
    holding = next(c for c in characters if missing[0] in c.encode())
    return (
        f"it has no token for {len(missing)} of the 243 bytes of UTF-8: {names}; text with them, "
        f"as {holding!a}, vanishes"
    )


def with_limited_runs(texts: Iterable[str]) -> Iterator[str]:
    """Yield texts in which no run of blanks, or of anything else, is long."""
    for text in texts:
        begin = 0
        for run in _LONG_RUN.finditer(text) if _may_have_long_run(text) else ():
            yield text[begin : run.start()]
            for at in range(run.start(), run.end(), RUN_CHARACTERS):
                yield text[at : min(at + RUN_CHARACTERS, run.end())]
            begin = run.end()
        yield text[begin:] if begin else text


def _may_have_long_run(text: str) -> bool:
    """Return False where no run of blanks, or of anything else, is long."""
    longest = max(map(len, text[::_STRIDE].split()), default=0)
    blanks = _SAMPLED_BLANKS.search(text[::_BLANK_STRIDE])
    return longest >= RUN_CHARACTERS // _STRIDE or bool(blanks)

"""Write a tokenizer as the metadata of a GGUF file, where llama.cpp splits text as it does.

llama.cpp knows byte-level BPE by vocabulary and merges, and a list of named ways to split text
into words (`src/llama-vocab.cpp`). A file cannot bring a way of its own, so with a tokenizer that
splits otherwise it would read other tokens than the model was trained on, in silence. Such a
tokenizer is refused.
"""

from typing import Any, NamedTuple

from headrace.core.errors import UnsupportedError
from headrace.core.remedy import mend
from headrace.data.bpe import PATTERNS
from headrace.data.spelling import is_byte_level, steps_of
from headrace.data.tokenizer import Tokenizer, split_pattern

_R50K = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"
SPLITS: dict[str | None, str] = {
    PATTERNS["gpt2"]: "gpt-2",
    _R50K: "gpt-2",
    PATTERNS["gpt4"]: "dbrx",
    PATTERNS["qwen"]: "qwen2",
}
"""llama.cpp's name of a way to split text, by its regular expression."""
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
"""Kinds of tokens in a GGUF file: of text, never of text, of text before anything else, none."""
_ODD = ("dropout", "unk_token", "continuing_subword_prefix", "end_of_word_suffix", "fuse_unk")
_REACHES = ("single_word", "lstrip", "rstrip")
"""What makes an added token take in its surroundings."""


class GgufTokenizer(NamedTuple):
    """Hold a tokenizer as a GGUF file has it."""

    tokens: list[str]
    token_types: list[int]
    merges: list[str]
    split: str
    """llama.cpp's name of the way to split text"""
    notes: tuple[str, ...]
    """what llama.cpp does otherwise with some texts, told to the user"""


def vocabulary(tokenizer: Tokenizer) -> GgufTokenizer:
    """Return the metadata of a tokenizer, whose ids are those of the model's rows.

    Raises:
        UnsupportedError: llama.cpp has no tokenizer that makes the same tokens; its remedy is a
            change of the plan.
    """
    spec = tokenizer.spec
    model, added = spec["model"], spec.get("added_tokens") or []
    split, fault = _split(spec)
    if fault:
        raise UnsupportedError(
            f"llama.cpp has no tokenizer that makes the same tokens: {fault}",
            mend("data.tokenizer=bpe", "data.tokenizer_pattern=gpt4"),
        )
    tokens = [f"[unused {i}]" for i in range(tokenizer.vocab)]
    token_types = [UNUSED] * tokenizer.vocab
    for token, i in model["vocab"].items():
        tokens[i], token_types[i] = token, NORMAL
    for one in added:
        i = one["id"]
        tokens[i], token_types[i] = one["content"], CONTROL if one.get("special") else USER_DEFINED
    token_types[tokenizer.document_token] = CONTROL
    merges = [m if isinstance(m, str) else " ".join(m) for m in model["merges"]]
    forms = [step["type"] for step in steps_of(spec.get("normalizer"))]
    notes = tuple(f"llama.cpp does not bring text into the form {form}" for form in forms)
    return GgufTokenizer(tokens, token_types, merges, split, notes)


def _split(spec: dict[str, Any]) -> tuple[str, str]:
    """Return llama.cpp's name of how a tokenizer splits text, or "" and what it has no name for."""
    model, steps = spec["model"], steps_of(spec.get("pre_tokenizer"))
    normalizers = [step["type"] for step in steps_of(spec.get("normalizer"))]
    if model.get("type", "BPE") != "BPE" or not is_byte_level(spec):
        return "", f"this one is {model.get('type', 'BPE')}, and not a BPE of bytes"
    if odd := [key for key in _ODD if model.get(key)]:
        return "", f"this one has {odd[0]} = {model[odd[0]]!r}"
    if normalizers not in ([], ["NFC"]):
        return "", f"this one rewrites text by {', '.join(normalizers)}"
    for one in spec.get("added_tokens") or []:
        reaches = [key for key in _REACHES if one.get(key)]
        if reaches and not one.get("special"):
            return "", f"its token {one['content']!r} has {reaches[0]}"
    match steps:
        case [
            {"type": "Digits", "individual_digits": True},
            {"type": "ByteLevel", "add_prefix_space": False, "use_regex": True},
        ]:
            name = "smollm"
        case _:
            name = SPLITS.get(pattern := split_pattern(spec), "")
            if pattern == PATTERNS["nanochat"]:
                return "", "this one splits numbers in twos (data.tokenizer_pattern = 'nanochat')"
    if not name:
        stages = [step["type"] for step in steps]
        return (
            "",
            f"this one splits text by {split_pattern(spec) or ', '.join(stages) or 'nothing'}",
        )
    if model.get("ignore_merges"):
        # The same split, by which a word that is a token is taken before merges are looked at.
        return ("llama-bpe", "") if name == "dbrx" else ("", "this one has ignore_merges = True")
    return name, ""

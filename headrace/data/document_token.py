"""The token that begins every document of a tokenizer that was brought along."""

from collections.abc import Callable
from typing import Any

import numpy as np

from headrace.core.errors import ConfigError

END_OF_TEXT = "<|endoftext|>"
_KNOWN = (
    *(END_OF_TEXT, "<|begin_of_text|>", "<|startoftext|>", "<bos>", "<s>"),
    *("</s>", "<eos>", "<|end_of_text|>", "<|im_end|>"),
)


def find_document_token(
    spec: dict[str, Any],
    ids: dict[str, int],
    encode: Callable[[list[str]], list[np.ndarray]],
    name: str,
) -> tuple[int, str]:
    """Return the id that begins documents, and what a user is told of it.

    It is a special token. Where a file marks none, it is the one known name in the vocabulary, if
    no text becomes it: else it could not be told from text.

    Args:
        spec: the tokenizer.json.
        ids: every token's id.
        encode: makes ids of texts.
        name: what the file is called in messages.

    Raises:
        ConfigError: there is none.
    """
    special = [t["content"] for t in spec["added_tokens"] if t.get("special")]
    known = next((t for t in _KNOWN if t in special), None)
    if known is not None:
        return ids[known], ""
    plain = [token for token in _KNOWN if token in ids]
    if not special and len(plain) == 1:
        token, own = plain[0], ids[plain[0]]
        texts = [token, f"a{token}", f"{token} {token}", f"\n{token}\n"]
        if not any((text_ids == own).any() for text_ids in encode(texts)):
            return own, (
                f"{name} has no special token; {token} (id {own}) of its vocabulary, which no text "
                "becomes, begins documents"
            )
    raise ConfigError(
        f"{name} has no special token to begin a document with; its special tokens are "
        f"{', '.join(special[:8]) or 'none'}, known ones are {', '.join(_KNOWN)}",
        "add one of them to its added_tokens, or data.tokenizer=bpe",
    )

"""Read the manifest of a shard set, which says what its files hold and seals its own fields."""

import hashlib
import json
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)

from headrace.core.strict import Strict

FORMAT = 3
DIGESTED_AS = 2
"""The format under which runs keep the digest of a manifest: what it covers is the same since."""

Count = Annotated[int, Field(ge=0, lt=1 << 62)]
Sha256 = Annotated[str, Field(pattern="^[0-9a-f]{64}$")]


class FileEntry(Strict):
    """An entry describes one file of the set."""

    items: Count
    """Tokens, or documents for the offsets."""
    sha256: Sha256


class Manifest(Strict):
    """What a shard set holds."""

    format: int = FORMAT
    dtype: Literal["uint16", "uint32"]
    vocab: int = Field(ge=1, le=1 << 32)
    document_token: Count
    """The id at the start of every document."""
    shard_tokens: int = Field(ge=1, lt=1 << 62)
    """Tokens in every file but the last."""
    tokens: Count
    documents: Count
    text_bytes: Count
    """UTF-8 bytes of the documents."""
    counted_bytes: Count
    """Bytes that the tokens stand for: fewer or more where the tokenizer changes text."""
    files: tuple[FileEntry, ...]
    offsets: FileEntry
    answers: tuple[FileEntry, ...] | None = None
    """Files with a byte for each token of conversations, None for texts: 1 where it counts, 2 in
    the rejected answer of a preference pair, which stands after the chosen one."""
    tokenizer: str
    """Fingerprint of the tokenizer."""
    source: str
    """What the user named."""
    rebuild: str
    """The command that makes this set again."""
    seal: str = ""
    """sha256 of all other fields."""

    @property
    def digest(self) -> str:
        """Return the sha256 over every field but the seal."""
        fields = self.model_dump(mode="json", exclude={"seal"})
        return hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()

    @model_serializer(mode="wrap")
    def _leave_out_absent(self, write: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields without absent answers, as older manifests are sealed."""
        return {key: value for key, value in write(self).items() if key != "answers" or value}

    @property
    def content_digest(self) -> str:
        """Return the sha256 of all but names and commands: what tells the content."""
        content = self.model_dump(mode="json", exclude={"seal", "source", "rebuild"})
        content["format"] = DIGESTED_AS
        return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()

    @model_validator(mode="after")
    def _check(self) -> "Manifest":
        *full, last = [f.items for f in self.files] or [0]
        if any(items != self.shard_tokens for items in full) or last > self.shard_tokens:
            raise ValueError(f"its files do not hold {self.shard_tokens:,} tokens each")
        if sum(full) + last != self.tokens:
            raise ValueError(f"its files hold {sum(full) + last:,} tokens, not {self.tokens:,}")
        if self.answers is not None and [a.items for a in self.answers] != [
            f.items for f in self.files
        ]:
            raise ValueError("its answers are not as many as its tokens")
        if self.offsets.items != self.documents:
            raise ValueError(f"{self.offsets.items:,} offsets, for {self.documents:,} documents")
        if self.document_token >= self.vocab:
            raise ValueError(f"document_token {self.document_token} is none of {self.vocab} ids")
        if (self.dtype == "uint16") != (self.vocab <= 1 << 16):
            raise ValueError(f"{self.dtype} is not how {self.vocab:,} ids are kept")
        return self

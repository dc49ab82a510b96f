"""What an inspection found, as a record that a table, a page and JSON are made from."""

from typing import Any, Literal

from headrace.core.strict import Strict
from headrace.data.left_out import LeftOut

PolicyName = Literal["cut", "pad", "best_fit"]


class LengthGroup(Strict):
    """Hold documents of about one length."""

    from_bytes: int
    """The least length of the group; that of the next group is an eighth of an octave on."""
    documents: int
    text_bytes: int
    tokens: float
    """Tokens of them all, estimated, each with its document token."""


class ScriptSummary(Strict):
    """What is written in one script. Its fertility is measured on a sample of it."""

    script: str
    documents: int
    text_bytes: int
    sample_bytes: int
    tokens_per_byte: float
    tokens_per_character: float
    tokens_per_word: float | None
    """None in scripts that put no blanks between words."""


class RepeatedExample(Strict):
    """A text that stands in the corpus several times."""

    text: str
    """Its first characters."""
    times: int
    origins: tuple[str, ...]
    """Where the first two stand."""


class RepeatedShare(Strict):
    """How much repeats what came before, counted in a sample that is chosen by hash.

    All copies of a text have one hash, so a text that is in the sample is there with all of them.
    """

    seen: int
    """Items that were met."""
    sampled: int
    """Different ones that were kept."""
    exact: bool
    """Whether all of them were kept, so that the shares are counts."""
    share: float
    """Share of the items that repeat an earlier one."""
    low: float
    high: float
    """Ends of the share's interval of 95%."""
    bytes_share: float
    """Share of the bytes that are in such items."""
    examples: tuple[RepeatedExample, ...]


class NearValidation(Strict):
    """Say how many documents that a share holds out have a near copy that is trained on.

    Sides are told by the hash of the text alone, before documents are cut or moved.
    """

    asked: float
    """`data.validation`."""
    documents: int
    """Documents of the sample that are held out, equal ones included."""
    near: int
    """How many of them have a near copy in the sample that is trained on."""
    share: float
    """Share of the held-out documents that have one, estimated."""
    exact: bool
    """Whether all documents were compared."""


class SpecialTextCount(Strict):
    """Text that spells a special token. It is text, and becomes ordinary tokens."""

    text: str
    documents: int
    times: int
    first: str
    """Where the first stands."""


class PackingEstimate(Strict):
    """Say what one way to make rows of documents costs, estimated from their lengths."""

    policy: PolicyName
    rows: int
    padding: float
    """Share of the rows' tokens that are padding."""
    cropped: float
    """Share of the text's tokens that are never read."""
    split: float
    """Share of the documents that stand in more than one row."""


class RefusedFile(Strict):
    """A file, or a source, that preparing the data would refuse."""

    message: str
    remedy: str


class Inspection(Strict):
    """What a corpus holds."""

    sources: tuple[str, ...]
    files: int
    documents: int
    text_bytes: int
    characters: int
    median_bytes: int
    p90_bytes: int
    p99_bytes: int
    """Lengths of documents, to an eighth of an octave."""
    longest_bytes: int
    longest: str
    """Where the longest document stands."""
    tokenizer: str
    """Which tokenizer the tokens are of."""
    tokens: float
    """Tokens of the text, estimated, document tokens included."""
    sequence_length: int
    scripts: tuple[ScriptSummary, ...]
    lengths: tuple[LengthGroup, ...]
    cropped_at: tuple[tuple[int, float], ...]
    """(Sequence length, share of the tokens that stand behind it in their document)."""
    packing: tuple[PackingEstimate, ...]
    best_packing: PolicyName
    repeated_documents: RepeatedShare
    repeated_paragraphs: RepeatedShare
    near_documents: RepeatedShare | None
    """Documents that nearly repeat others, equal ones included; None where Numba is missing."""
    near_validation: NearValidation | None
    """None where validation has a text of its own too, or nothing is compared."""
    special_texts: tuple[SpecialTextCount, ...]
    left_out: tuple[LeftOut, ...]
    refused: tuple[RefusedFile, ...]
    refused_files: int
    """Files that would be refused, of which `refused` has the first."""
    bound_bytes: int
    """Memory that the pass takes at most, beside the longest document's."""

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values, with the reasons of what is left out in words too."""
        left_out = [one.to_dict() for one in self.left_out]
        return {**self.model_dump(mode="json"), "left_out": left_out}

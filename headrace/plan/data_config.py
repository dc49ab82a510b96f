"""Define the plan's table `data`: where text comes from and how it becomes tokens."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from headrace.core.limits import WIDEST, TokenizerPattern, TokenizerText
from headrace.core.remedy import leave_out, mend
from headrace.core.strict import Strict, Wrong
from headrace.plan.chat import ChatConfig
from headrace.plan.cleaning import DecontaminationConfig, DeduplicationConfig
from headrace.plan.curriculum import CurriculumConfig
from headrace.plan.mixture import MixtureConfig
from headrace.plan.text_template import TextTemplate

Share = Annotated[float, Field(gt=0, lt=1)]


class DataConfig(Strict):
    """Say where the text comes from and how it becomes one stream of tokens."""

    sources: str | tuple[str, ...] = "stdlib"
    """File, folder, glob, `hf:NAME`, `stdlib` (the Python standard library), or a list of them."""
    weights: tuple[Annotated[float, Field(gt=0, le=1e12)], ...] | None = None
    """One share per source; without it every source counts by its tokens."""
    mixture: MixtureConfig | None = None
    """Shares that change by stage, limits of tokens and epochs, and temperature."""
    validation: Share | str = 0.05
    """The share of the text that is held out, by hash of its documents; or a path of its own."""
    text_key: str = "text"
    """The field that holds the text of a row; dots lead into it, as in `messages.0.content`."""
    text_template: TextTemplate = ""
    """Join several fields of a row to its text, as in `{title}: {body.text}`: each name in braces
    is replaced by that field, a null by nothing. Left empty, `text_key` alone is the text."""
    separator: str = ""
    """A text at which a document is cut into several, as in `<|endoftext|>`; it is no part of them.
    Left empty, such text is text, and never becomes a special token."""
    invalid_utf8: Literal["refuse", "replace"] = "refuse"
    """Whether a file with bytes that are not UTF-8 is refused, or each becomes U+FFFD and is
    counted."""
    deduplication: DeduplicationConfig | None = None
    """Train on one of several equal texts; without this table all of them are trained on."""
    decontamination: DecontaminationConfig | None = DecontaminationConfig()
    """Take text of evaluation sets out of the text that is trained on: of the validation text
    wherever `data.validation` is a path."""
    tokenizer: str = "bpe"
    """`bpe` trains one; or a path of a tokenizer.json; or `tiktoken:NAME`. Left alone, a run that
    starts from `model.pretrained` takes the tokenizer of its folder."""
    lossy_tokenizer: bool = False
    """Accept a tokenizer that does not give back every text, as one that composes accents (NFC) or
    lowers case. Bits per byte are still of the raw text, and every report says so."""
    vocab: int = Field(default=4096, ge=257, le=WIDEST)
    """Entries of a tokenizer that is trained here."""
    tokenizer_pattern: TokenizerPattern = "nanochat"
    """How text falls into words before `bpe` is trained: as for GPT-2, GPT-4 (cl100k_base) or Qwen,
    or as in nanochat, which is GPT-4's way with numbers in twos."""
    tokenizer_text: TokenizerText = "sample"
    """What `bpe` is trained on: `sample` is up to 64 MiB picked by hash from all text; `all` counts
    every word in a pass of its own, in memory that does not grow with the text."""
    special_tokens: tuple[str, ...] = ()
    """Further special tokens of a trained tokenizer, such as `<|user|>`; `vocab` counts them."""
    special_from_text: bool = False
    """Let text that spells one of `special_tokens` become it. Otherwise no text ever does."""
    chat: ChatConfig | None = None
    """Read conversations, and count their answers only; without this table all rows are text."""
    sequence_length: int = Field(default=256, ge=1, le=WIDEST)
    """Tokens of a sequence: at least 2, and 1 of images, whose one token is the label."""
    directory: str = "data"
    """Prepared shards are kept under this folder, named by what went into them."""
    workers: int = Field(default=1, ge=0, le=1024)
    """Threads that read ahead; 0 reads on the training thread."""
    prefetch: int = Field(default=4, ge=1, le=1 << 16)
    """Micro-batches that are read ahead."""
    curriculum: CurriculumConfig | None = None
    """Which rows come first, by a score of their text; without it every row may come at any time.
    """

    @model_validator(mode="after")
    def _check_chat(self) -> Self:
        """Refuse keys that make text of rows beside a table that makes conversations of them."""
        if self.chat is None:
            return self
        for key in ("text_template", "separator"):
            if value := getattr(self, key):
                raise Wrong(
                    f"{key} = {value!r} makes text of rows, and data.chat makes conversations of "
                    "them",
                    leave_out(f"data.{key}"),
                )
        table = self.deduplication
        if table is not None and table.method in ("paragraph", "bloom"):
            raise Wrong(
                f"deduplication.method = {table.method!r} takes paragraphs out of documents, and a "
                "conversation is one whole",
                mend("data.deduplication.method=minhash") | mend("data.deduplication.method=exact"),
            )
        return self

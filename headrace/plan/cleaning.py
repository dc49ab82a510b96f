"""Define the tables `data.deduplication` and `data.decontamination` of a plan."""

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, model_validator

from headrace.core.remedy import leave_out
from headrace.core.strict import Strict, Wrong

PositiveShare = Annotated[float, Field(gt=0, le=1)]
"""A share above 0, up to all."""
Keep = Literal["first", "longest"]
"""Which of several similar documents stays: `longest`, or of the `first` source that has one. Of
those left the one with the least digest of its text does, so that no order of files matters."""
Scope = Literal["source", "all"]
"""Compare the documents of each source, or those of all."""
LEAST_THRESHOLD = 0.75
"""Lowest Jaccard index for which sketches (see data/quality/bands.py) tell pairs that are wanted
from pairs below 0.5, which are never merged."""
RATES = (1e-4, 0.5)
"""Lowest and highest rate of false positives for which a filter is made."""
KNOBS = {
    "exact": ("scope",),
    "paragraph": ("scope", "keep"),
    "minhash": ("scope", "keep", "threshold", "recall"),
    "bloom": ("false_positive_rate",),
}
"""Which keys each method reads beside `method`."""


class DeduplicationConfig(Strict):
    """Train on one of several equal texts, and say which are equal."""

    table: ClassVar[str] = "data.deduplication"
    """Where its keys stand in a plan."""
    method: Literal["exact", "paragraph", "minhash", "bloom"] = "exact"
    """`exact`: documents whose text is equal; `paragraph`: paragraphs that are equal; `minhash`:
    documents that share most of their runs of words; `bloom`: paragraphs most of whose runs of
    words came before, in the order of the sources."""
    scope: Scope = "all"
    """Compare the texts of each source, or those of all sources."""
    keep: Keep = "first"
    """Which of several stays: the first, or that of the longest document."""
    threshold: float = Field(default=0.8, ge=LEAST_THRESHOLD, lt=1)
    """Share of the runs of words of two documents (Jaccard index) that `minhash` looks for."""
    recall: float = Field(default=0.999, ge=0.5, lt=1)
    """Share of the pairs at the threshold that `minhash` compares."""
    false_positive_rate: float = Field(default=0.01, ge=RATES[0], le=RATES[1])
    """Share of the new runs of words that `bloom` takes for old ones."""

    @model_validator(mode="after")
    def _check_knobs(self) -> Self:
        """Refuse a key that the method does not read."""
        for name, field in DeduplicationConfig.model_fields.items():
            value = getattr(self, name)
            if name not in ("method", *KNOBS[self.method]) and value != field.default:
                methods = " and ".join(m for m, knobs in KNOBS.items() if name in knobs)
                raise Wrong(
                    f"{name} = {value!r} is read by {methods}, and the method is {self.method!r}",
                    leave_out(f"{self.table}.{name}"),
                )
        return self


class DecontaminationConfig(Strict):
    """Take text of evaluation sets out of the text that is trained on.

    The validation text is one of them wherever `data.validation` is a path.
    """

    remove: Literal["passage", "document", "nothing"] = "passage"
    """What falls of a contaminated document: the passages that are found, all of it, or nothing:
    then it is only told."""
    share: PositiveShare = 0.5
    """A document is contaminated where this share of its words, or of an evaluation document's
    words, stands in runs of words that both have."""
    words: int = Field(default=13, ge=5, le=64)
    """Words of a run that is compared; letter case and punctuation do not count."""
    against: tuple[str, ...] = ()
    """Evaluation sets beside the validation text: files, folders, globs, `hf:NAME`, or names of
    installed sets: those in ~/.cache/headrace/benchmarks and in Hugging Face's cache."""
    against_key: str = ""
    """The field that holds their text, or a template, as '{query} {choices.0}'; "" takes
    `data.text_key`."""

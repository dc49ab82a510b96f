"""Choose what deduplicates a text by the table `data.deduplication`."""

from collections.abc import Callable, Iterable

from headrace.data.quality.bloom import RepeatedPassages, count_ngrams
from headrace.data.quality.cleaner import Cleaner, PartState, Remains
from headrace.data.quality.exact import ExactDocuments, ExactParagraphs
from headrace.data.quality.minhash import NearDuplicates
from headrace.data.quality.passages import CutDocuments
from headrace.data.quality.whole import WholeDocuments
from headrace.plan.cleaning import DeduplicationConfig


def make_deduplicator(
    config: DeduplicationConfig, texts: Callable[[], Iterable[str]], *, threads: int = 0
) -> Cleaner:
    """Return what learns and cleans a text as the table says.

    Args:
        config: the table.
        texts: reads all documents; a filter is made as large as their n-grams need.
        threads: that sketch near-duplicates; 0 takes the cores that this process may use.

    Raises:
        UnsupportedError: Numba is not installed, and the method needs it.
    """
    if config.method == "exact":
        return ExactDocuments(config.scope)
    if config.method == "paragraph":
        return ExactParagraphs(scope=config.scope, keep=config.keep)
    if config.method == "bloom":
        return RepeatedPassages(
            ngrams=max(1, count_ngrams(texts())), rate=config.false_positive_rate
        )
    return NearDuplicates(
        threshold=config.threshold,
        recall=config.recall,
        scope=config.scope,
        keep=config.keep,
        workers=threads,
    )


def decided_duplicates(config: DeduplicationConfig, state: PartState, source: int) -> Remains:
    """Return what applies to the documents of a part what a cleaner of the table has decided.

    Args:
        config: the table.
        state: what `Cleaner.decided` returned of the part.
        source: number of the part's source.
    """
    whole = config.method in ("exact", "minhash")
    return (WholeDocuments if whole else CutDocuments).of_decided(state, source)

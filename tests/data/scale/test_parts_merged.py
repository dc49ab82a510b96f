"""What parts of a text give is merged to what the whole text gives, whatever the parts."""

import random
from collections.abc import Callable
from itertools import pairwise

import pytest

from headrace.core.errors import ConfigError
from headrace.data import heldout, survey
from headrace.data.heldout import Weights
from headrace.data.quality import audit
from headrace.data.quality.cleaner import PartCleaner
from headrace.data.quality.decontaminate import Decontaminator
from headrace.data.quality.exact import ExactDocuments, ExactParagraphs
from headrace.data.quality.minhash import NearDuplicates
from headrace.data.survey import Survey
from headrace.plan.cleaning import DecontaminationConfig

TEXTS = [(n % 3, f"document {n} " + "abc\n" * (n % 50)) for n in range(600)]


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bounds that a small text meets: units become coarser, and the sample loses pieces."""
    monkeypatch.setattr(heldout, "MOST_UNITS", 40)
    monkeypatch.setattr(survey, "SAMPLE_BYTES", 4000)
    monkeypatch.setattr(survey, "PIECE_CHARACTERS", 50)


def surveyed(texts: list[tuple[int, str]]) -> Survey:
    learned = Survey(Weights(0.1))
    for source, text in texts:
        learned.add(text, keep_sample=True, source=source)
    return learned


@pytest.mark.parametrize("seed", range(4))
def test_merged_surveys_are_that_of_the_whole(small: None, seed: int) -> None:
    whole, draw = surveyed(TEXTS), random.Random(seed)
    cuts = sorted(draw.sample(range(1, len(TEXTS)), 7))
    parts = [TEXTS[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
    merged = Survey(Weights(0.1))
    for part in parts:
        merged.merge(Survey.of_state(surveyed(part).state()))
    right = surveyed(parts[-2])
    right.merge(surveyed(parts[-1]))
    grouped = surveyed([text for part in parts[:-2] for text in part])
    grouped.merge(right)
    expected = whole.state()
    units = expected["weights"].pop("units")
    assert expected["weights"]["shift"] > 0 and expected["bar"] < heldout.PLACES
    assert 0 < len(units) <= 40 and len(whole.sample) > 10
    for other in (merged, grouped):
        state = other.state()
        assert sorted(state["weights"].pop("units")) == sorted(units)
        assert state == expected and other.sample_bytes == whole.sample_bytes
        assert other.weights.split() == whole.weights.split() is not None


def test_a_split_is_read_back() -> None:
    split = surveyed(TEXTS).weights.split()
    assert split is not None and (split.cut or split.border)
    assert heldout.Split.of_state(split.state()) == split


Tried = ExactDocuments | ExactParagraphs | NearDuplicates | Decontaminator
CLEANERS: dict[str, Callable[[], Tried]] = {
    "exact": ExactDocuments,
    "paragraph": lambda: ExactParagraphs(keep="longest", least_bytes=8),
    "minhash": lambda: NearDuplicates(workers=1),
    "evaluation": lambda: compared_with_evaluation(),
}


def compared_with_evaluation() -> Decontaminator:
    """Return a cleaner that knows documents of which the text holds copies, one of them short."""
    cleaner = Decontaminator(DecontaminationConfig())
    for n in (7, 30, 101):
        cleaner.evaluate(passages(n).partition("\n\n")[0], is_validation=n == 30)
    cleaner.evaluate("just this")
    return cleaner


def passages(number: int) -> str:
    """Return two paragraphs; a fifth of the texts shares its first one with others."""
    first = number % 20 if number % 5 == 0 else number
    both = ([first * k % 101 for k in range(3, 40)], [number * k % 89 for k in range(2, 30)])
    return "\n\n".join(" ".join(f"word{n}" for n in words) for words in both)


SLOW = pytest.param("minhash", marks=pytest.mark.slow)  # Numba compiles for seconds


@pytest.mark.parametrize("name", ["exact", "paragraph", SLOW, "evaluation"])
def test_cleaners_of_parts_are_that_of_the_whole(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit, "SAMPLE_BYTES", 4000)
    texts = [(n * 3 // 240, passages(n % 150)) for n in range(240)]
    texts[50] = (0, "just this")
    begins = {source: [s for s, _ in texts].index(source) for source in range(3)}
    whole = CLEANERS[name]()
    for place, (source, text) in enumerate(texts):
        whole.learn(source, place - begins[source], text)
    merged = CLEANERS[name]()
    assert isinstance(merged, PartCleaner)
    borders = [0, 1, 33, *list(begins.values())[1:], 170, 170, len(texts)]
    for begin, end in pairwise(borders):
        part = CLEANERS[name]()
        assert isinstance(part, PartCleaner)
        source = texts[min(begin, len(texts) - 1)][0]
        for index, (_, text) in enumerate(texts[begin:end]):
            part.learn(source, index, text)
        merged.merge(part.learned(), source, begin - begins[source])
    report = whole.finish()
    assert merged.finish() == report and (report.dropped_documents or report.cut_documents)
    for place, (source, text) in enumerate(texts):
        index = place - begins[source]
        assert merged.apply(source, index, text) == whole.apply(source, index, text)
        alone = merged.of_decided(merged.decided(source, index, 1), source)
        assert alone.apply(source, 0, text) == whole.apply(source, index, text)


def test_evaluation_sets_that_changed_between_parts_are_refused() -> None:
    other = Decontaminator(DecontaminationConfig())
    other.evaluate(passages(8))
    with pytest.raises(ConfigError, match="an evaluation set changed while text was compared"):
        compared_with_evaluation().merge(other.learned(), 0, 0)

"""One pass says what a corpus holds; what it keeps has a bound, and files change no number."""

import hashlib
import json
import random
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from headrace.core.errors import ConfigError
from headrace.data.inspection import near, sketches
from headrace.data.inspection.near import NearRepeats
from headrace.data.inspection.packing import best_packing, estimate_packing
from headrace.data.inspection.record import Inspection
from headrace.data.inspection.run import inspect_data
from headrace.data.inspection.scripts import NO_LETTERS, script_of
from headrace.data.inspection.sketches import Repeats, Sample, paragraphs, whole
from headrace.data.inspection.words import facts
from headrace.data.sources import Document
from headrace.plan.data_config import DataConfig
from headrace.report.inspection import inspection_page

DATA = DataConfig(vocab=300, sequence_length=64)
MARKUP = "<script>alert(1)</script>"


def corpus(folder: Path, parts: int = 1) -> Path:
    """Write 400 documents, of which a quarter stand there twice, into some files."""
    chance = random.Random(3)
    names = ["mill", "wheel", "river", "stone", "grain", "sluice"]
    rows = [" ".join(chance.choices(names, k=chance.randrange(9, 90))) for _ in range(300)]
    rows += rows[:100]
    rows[0] += f"<|im_start|> {MARKUP} <|im_start|>"
    rows[1:4] = [
        "\u041c\u0435\u043b\u044c\u043d\u0438\u0446\u0430 \u0443 \u0440\u0435\u043a\u0438 " * 20
    ] * 3
    folder.mkdir()
    for part in range(parts):
        lines = [json.dumps({"text": row}) + "\n" for row in rows[part::parts]]
        (folder / f"{part}.jsonl").write_text("".join(lines))
    return folder


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Inspection:
    folder = corpus(tmp_path_factory.mktemp("inspect") / "in")
    (folder / "bad.jsonl").write_text('{"text": "one"}\n{"text": 7}\n')
    (folder / "empty.txt").touch()
    (folder / f"{MARKUP.replace('/', '')}.txt").write_bytes(b"caf\xe9")
    return inspect_data([str(folder)], DATA)


def test_it_says_what_is_there(found: Inspection) -> None:
    assert (found.documents, found.files) == (401, 3)
    assert sum(group.documents for group in found.lengths) == 401
    assert sum(group.text_bytes for group in found.lengths) == found.text_bytes
    assert [(one.script, one.documents) for one in found.scripts] == [
        ("Latin", 398),
        ("Cyrillic", 3),
    ]
    assert found.repeated_documents.exact and found.repeated_documents.seen == 401
    # Of 401, 99 repeat: 96 of the first hundred, the marked one does not, three are one text.
    assert round(found.repeated_documents.share * 401) == 96 + 2
    (special,) = found.special_texts
    assert (special.text, special.documents, special.times) == ("<|im_start|>", 1, 2)
    assert special.first.endswith("0.jsonl:1")
    assert [one.reason.value for one in found.left_out] == ["empty_file"]
    refused = [one.message for one in found.refused]
    assert found.refused_files == 2
    assert "is not UTF-8" in refused[0] and "holds int, not text" in refused[1]
    assert all(one.remedy for one in found.refused)


def test_tokens_are_those_of_the_text(found: Inspection) -> None:
    """The sample is all of so small a text, so the estimate is off by borders of pieces only."""
    latin = found.scripts[0]
    assert latin.sample_bytes == latin.text_bytes
    assert latin.tokens_per_word and latin.tokens_per_word > latin.tokens_per_character
    sums = sum(one.tokens_per_byte * one.text_bytes for one in found.scripts)
    assert found.tokens == pytest.approx(sums + found.documents)
    assert dict(found.cropped_at)[64] == pytest.approx(found.packing[1].cropped, abs=0.02)


def test_files_change_no_number(tmp_path: Path) -> None:
    one, other = (
        inspect_data([str(corpus(tmp_path / f"{parts}", parts))], DATA).to_dict()
        for parts in (1, 7)
    )
    told = ("sources", "files", "longest", "special_texts")
    examples = ("repeated_documents", "repeated_paragraphs", "near_documents")
    for record in (one, other):
        for key in told:
            record.pop(key)
        for key in examples:
            record[key].pop("examples")
    assert one == other


def near_copies(count: int) -> list[Document]:
    """Return unlike documents of 60 words; two thirds have a near copy that lacks the last one."""
    chance = random.Random(5)
    words = [f"w{number}" for number in range(4000)]
    texts = [" ".join(chance.choices(words, k=60)) for _ in range(count)]
    texts += [text.rpartition(" ")[0] for text in texts[: 2 * count // 3]]
    return [Document(text, str(number)) for number, text in enumerate(texts)]


def estimate(documents: list[Document], validation: float | str = 0.5) -> NearRepeats:
    found = NearRepeats(validation)
    for document in documents:
        found.add(document)
    return found


def test_near_copies_are_counted_whatever_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    documents = near_copies(300)
    share, held_out = estimate([*documents, documents[0], documents[7]]).result()
    assert share.exact and (share.seen, share.sampled) == (502, 500)
    assert share.share == share.low == share.high == pytest.approx(202 / 502)
    assert share.examples[0].times in (2, 3) and len(share.examples[0].origins) == 2

    def is_held(document: Document) -> bool:
        return hashlib.sha256(document.text.encode()).digest()[0] < 128

    pairs = list(zip(documents, documents[300:], strict=False))
    assert held_out is not None and held_out.exact and held_out.asked == 0.5
    copies = [documents[0], documents[7]]
    assert held_out.documents == sum(map(is_held, [*documents, *copies]))
    parted = [one if is_held(one) else two for one, two in pairs if is_held(one) != is_held(two)]
    assert held_out.near == len(parted) + sum(one in parted for one in copies) > 0
    assert estimate(documents, "own.txt").result()[1] is None

    monkeypatch.setattr(near, "SAMPLE_BYTES", 60_000)
    sampled = estimate(documents).result()
    assert sampled == estimate(documents[::-1]).result()
    assert not sampled[0].exact and sampled[0].sampled < 250
    assert sampled[0].low < 200 / 500 < sampled[0].high


def test_without_numba_near_copies_are_not_estimated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "numba", None)
    (tmp_path / "a.txt").write_text("the old mill by the river\n" * 9)
    found = inspect_data([str(tmp_path)], DATA)
    assert found.near_documents is None and found.near_validation is None
    assert [row[1] for row in facts(found) if row[0] == "near-duplicate documents"] == [
        "not estimated: pip install 'headrace[data]'"
    ]
    assert "headrace[data]" in inspection_page(found)


def test_a_page_escapes_what_text_and_names_hold(found: Inspection) -> None:
    page = inspection_page(found)
    assert "<script>" not in page and "&lt;script&gt;" in page
    for part in ("Lengths", "Rows of 64 tokens", "Cyrillic", "wins", "refused"):
        assert part in page
    assert page.count("<svg") == 2


def test_a_page_fits_a_phone(found: Inspection) -> None:
    """No table is so wide that it keeps its width, and no axis begins where there is nothing."""
    page = inspection_page(found)
    assert 'class="wide"' not in page.partition("</style>")[2]
    ticks = re.findall(r'text-anchor: middle">([^<]+)<', page)
    assert "1 B" not in ticks and "1" not in ticks
    least = min(one.from_bytes for one in found.lengths)
    octave = 1 << (least.bit_length() - 1)
    assert f"{octave} B" in ticks and "64" in ticks
    assert "Written by Headrace from the text." in page


def test_no_text_is_one_error(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": null}\n')
    with pytest.raises(ConfigError, match="give no text: 1 row whose text is null"):
        inspect_data([str(tmp_path)], DATA)
    (tmp_path / "a.jsonl").write_text('{"body": "one"}\n')
    with pytest.raises(ConfigError, match="no field 'text'") as caught:
        inspect_data([str(tmp_path)], DATA)
    assert caught.value.remedy.text == "data.text_key=body"


@pytest.mark.parametrize(
    ("text", "script"),
    [
        ("The mill caf\u00e9, \u0441\u0442", "Latin"),
        ("\u041c\u0435\u043b\u044c\u043d\u0438\u0446\u0430 on", "Cyrillic"),
        ("\u6c34\u8eca\u304c\u56de\u308b", "Japanese"),
        ("\u6c34\u8f66\u8f6c\u52a8\u3002", "Han"),
        ("\ubb3c\ub808\ubc29\uc544", "Hangul"),
        ("\u0939\u093f\u0928\u094d\u0926\u0940", "Devanagari"),
        ("\u0e44\u0e17\u0e22", "Thai"),
        ("12, 7 \u20ac \U0001f600", NO_LETTERS),
        ("1" * 9000 + "mill " * 3000, "Latin"),
    ],
)
def test_the_script_of_most_letters(text: str, script: str) -> None:
    assert script_of(text) == script


def test_repeats_of_a_sample_have_an_interval(monkeypatch: pytest.MonkeyPatch) -> None:
    """What is kept has a bound, and the share of all lies in the interval in 19 of 20 corpora."""
    monkeypatch.setattr(sketches, "KEPT", 300)
    inside = 0
    for corpus_number in range(40):
        chance, repeats, seen = random.Random(corpus_number), Repeats(whole), set[str]()
        again = 0
        for _ in range(3000):
            text = f"{corpus_number} {int(chance.paretovariate(0.4)) % 4000}"
            again += text in seen
            seen.add(text)
            repeats.add(Document(text, "a"))
        result = repeats.result()
        assert 150 <= result.sampled <= 300 and not result.exact
        inside += result.low <= again / 3000 <= result.high
    assert inside >= 34


def test_paragraphs_are_what_blank_lines_part() -> None:
    long = "the mill wheel turns with the river, day and night"
    assert [*paragraphs(f"Title\n\n{long}\n \t\n{long}\r\n\r\n  {long}  ")] == [long] * 3


def test_a_sample_has_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sketches, "SAMPLE_CHARACTERS", 1000)
    monkeypatch.setattr(sketches, "PIECE_CHARACTERS", 50)
    sample = Sample()
    for number in range(300):
        sample.add(f"{number:04d} " * 40, f"{number}".encode())
    assert 500 <= sum(map(len, sample.texts)) <= 1000
    assert len({text[:4] for text in sample.texts}) > 5


def test_the_packing_that_wins() -> None:
    """Compare with numbers by hand: four documents of 60 and four of 40 tokens in rows of 100."""
    lengths, counts = np.array([60.0, 40.0]), np.array([4, 4])
    cut, pad, best = estimate_packing(lengths, counts, 100)
    assert (cut.rows, cut.padding, cut.cropped) == (4, 0, 0)
    assert cut.split == pytest.approx((0.59 + 0.39) / 2)
    assert (pad.rows, pad.padding, pad.cropped, pad.split) == (8, 0.5, 0, 0)
    assert (best.rows, best.padding, best.cropped, best.split) == (4, 0, 0, 0)
    assert best_packing((cut, pad, best)) == "best_fit"
    cut, pad, best = estimate_packing(np.array([250.0]), np.array([10]), 100)
    assert pad.cropped == 0.6 and best.split == cut.split == 1
    assert best.rows == 25 and best_packing((cut, pad, best)) == "cut"
    equal = estimate_packing(np.array([100.0]), np.array([9]), 100)
    assert best_packing(equal) == "pad"


def test_many_documents_are_packed_by_their_lengths() -> None:
    chance = np.random.RandomState(5)
    lengths, counts = np.unique(
        np.clip(chance.lognormal(5, 1, 200_000), 5, 5000), return_counts=True
    )
    groups = np.geomspace(5, 5001, 80)
    place = np.digitize(lengths, groups)
    documents = np.bincount(place, weights=counts)
    tokens = np.bincount(place, weights=counts * lengths) / np.maximum(1, documents)
    kept = documents > 0
    _, _, best = estimate_packing(tokens[kept], documents[kept], 1024)
    assert 0 <= best.padding < 0.005
    assert best.rows * 1024 >= (tokens * documents).sum()

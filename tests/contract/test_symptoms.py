"""What techniques say that they are remedies for, in the doctor's words."""

import house
import pytest

from headrace.plan.symptoms import BOTTLENECKS, parse, saves_memory


def test_every_technique_speaks_the_doctors_words() -> None:
    for name, technique in house.CATALOGUE.techniques.items():
        said = [parse(symptom) for symptom in technique.symptoms]
        assert bool(said) == (name not in house.BASELINE) and len(said) == len({*said}), name


@pytest.mark.parametrize("word", ["memory", "memory:logits", "launch:logits", "input:", "Launch"])
def test_another_word_is_refused(word: str) -> None:
    with pytest.raises(ValueError, match=r"doctor's words|has the parts"):
        parse(word)


def test_every_part_is_some_techniques() -> None:
    """A part that no technique names would be a word without a use."""
    used = {parse(s) for t in house.CATALOGUE.techniques.values() for s in t.symptoms}
    unused = {(b, p) for b, parts in BOTTLENECKS.items() for p in parts} - used
    assert not unused


def test_what_trades_time_for_memory() -> None:
    paid = {n for n, t in house.CATALOGUE.techniques.items() if saves_memory(t.symptoms)}
    assert {"full_checkpoint", "optimizer_offload"} <= paid
    assert not {"dynamic_batch", "muon", "lora", "fused_cross_entropy"} & paid
    assert not saves_memory(())

"""Merging many pairs together gives what merging them in turn gives."""

from collections import Counter
from itertools import pairwise
from random import Random

import pytest

from headrace.data.merges import learn_from_counts, learned_pairs


def merged_in_turn(
    words: dict[str, int], merges: int
) -> tuple[list[bytes], list[tuple[bytes, bytes]]]:
    """Return the tokens that BPE makes by counting every pair anew before each merge, and of what.

    Of two pairs that spell the same the older counts.
    """
    tokens = [bytes([byte]) for byte in range(256)]
    made_of: dict[bytes, tuple[bytes, bytes]] = {}
    spelled = [([*word.encode()], count) for word, count in words.items()]
    for made in range(256, 256 + merges):
        pairs = Counter[tuple[int, int]]()
        for word, count in spelled:
            for pair in pairwise(word):
                pairs[pair] += count
        if not pairs:
            break
        pair = min(pairs, key=lambda pair: (-pairs[pair], pair))
        first, second = tokens[pair[0]], tokens[pair[1]]
        tokens.append(first + second)
        made_of.setdefault(tokens[-1], (first, second))
        for word, _ in spelled:
            at = 0
            while at < len(word) - 1:
                if (word[at], word[at + 1]) == pair:
                    word[at : at + 2] = [made]
                at += 1
    return [*dict.fromkeys(tokens)], [*made_of.values()]


@pytest.mark.parametrize("most", [1, 3, 5000])
def test_merges_are_those_of_one_pair_after_the_other(most: int) -> None:
    """Equal counts, runs of one letter, pairs that make others and words used up are all there."""
    random = Random(most)
    for letters in ("ab", "aab", "abc", "abcdefgh \u00e9\u4e2d", "etaoinshrdlu"):
        words = {
            "".join(random.choices(letters, k=random.randrange(1, 12))): random.randint(1, most)
            for _ in range(random.randrange(1, 60))
        }
        wanted, pairs = merged_in_turn(words, 150)
        ranks = learn_from_counts(words, 150)
        assert [*ranks] == wanted and learned_pairs(ranks) == pairs
        shuffled = dict(random.sample([*words.items()], len(words)))
        assert [*learn_from_counts(shuffled, 150)] == wanted
    assert len(learn_from_counts({}, 9)) == len(learn_from_counts({"a": 3}, 9)) == 256

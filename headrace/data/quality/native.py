"""Compile loops over the bytes of many documents: word n-grams, sketches, candidate pairs.

Nothing here holds the interpreter's lock, so that threads share the cores. Numba compiles a loop
when it is first called, for some seconds, and no compiled code is kept on a disk: a run reads no
file that can execute code. Import this module through `compiled`, which says what is missing.

Sketch: one-permutation hashing (Li, Owen, Zhang, arXiv 1208.1259). The hash of an n-gram says
which of `BINS` bins it falls into and its value there, and each bin keeps its least value: one
hash an n-gram, whatever the number of bins. A band reads bins that may be empty; such a bin takes
the value of a full one, which it seeks in an order of its own (optimal densification, Shrivastava,
arXiv 1703.04664). Four bits of each bin are kept to estimate a Jaccard index (b-bit minwise
hashing, Li and Koenig, arXiv 0910.3349).
"""

import numpy as np

from headrace.data.quality.bands import BINS, BITS
from headrace.data.quality.blocks import ANOTHER, block_of, fetch, insert, is_in
from headrace.data.quality.ngrams import (
    MIXER,
    PRIME,
    loop,
    mixed,
    next_ngrams,
    reset,
)
from headrace.data.quality.work import HEAD, SEEN

U = np.uint64
EMPTY = U(0xFFFFFFFFFFFFFFFF)
NIBBLES = 64 // BITS
"""Bins in a word of a sketch."""
WORDS = BINS // NIBBLES
MOST_LEADERS, MOST_KEPT = 64, 1024
"""Documents that one is compared with at most: of one key of a band, and of one cluster."""
U0, U1, U2, U3, U4, U6, U8, U9, U15, U16, U29, U32, U56 = map(
    U, (0, 1, 2, 3, 4, 6, 8, 9, 15, 16, 29, 32, 56)
)
LOW, EACH, BYTES = U(0xFFFF), U(0x1111111111111111), U(0x0F0F0F0F0F0F0F0F)
SUM = U(0x0101010101010101)
LAST_BIN, HALF = U(BINS - 1), U(0xFFFFFFFF)
AHEAD = U(16)
"""How many n-grams before it is read the block of one is asked for: as many as the processor waits
for at once, about."""


@loop
def equal_bins(first, second):
    """Return how many bins of a word of two sketches are full in either, in both, and equal."""
    differing = first ^ second
    differing |= differing >> U2
    differing = (differing | (differing >> U1)) & EACH
    one = first | (first >> U2)
    one = (one | (one >> U1)) & EACH
    two = second | (second >> U2)
    two = (two | (two >> U1)) & EACH
    return one | two, one & two, one & two & ~differing


@loop
def summed(nibbles):
    """Return the sum of 16 numbers of 4 bits, each at most 1."""
    return (((nibbles & BYTES) + ((nibbles >> U4) & BYTES)) * SUM) >> U56


@loop
def estimate(first, second):
    """Return the Jaccard index that two sketches of `WORDS` words estimate.

    Bins that hold different n-grams look equal once in 15 times, which is taken out.
    """
    either, both, equal = U0, U0, U0
    for word in range(WORDS):
        a, b, c = equal_bins(first[word], second[word])
        either += summed(a)
        both += summed(b)
        equal += summed(c)
    if either == U0:
        return 0.0
    return (15.0 * np.float64(equal) - np.float64(both)) / (14.0 * np.float64(either))


@loop
def seek(bins, full, filled, place):
    """Return the first full bin in the order of all bins that belongs to `place`."""
    h = mixed((place + U1) * PRIME)
    step, at = (h & LAST_BIN) | U1, (h >> U8) & LAST_BIN
    if filled * filled >= U(BINS):
        while bins[at] == EMPTY:
            at = (at + step) & LAST_BIN
        return at
    inverse = step  # of an odd number modulo a power of 2, by Newton
    for _ in range(4):
        inverse = inverse * (U2 - step * inverse)
    nearest, chosen = EMPTY, U0
    for number in range(filled):
        distance = ((full[number] - at) * inverse) & LAST_BIN
        if distance < nearest:
            nearest, chosen = distance, full[number]
    return chosen


@loop
def sketch(text, starts, letters, work, bands, rows, bar, most, kept, keys, least, sampled, ends):
    """Write the sketch of each document, and the n-grams of those that are sampled.

    Args:
        text: bytes of all of them.
        starts: where each begins, and where the last ends.
        letters: what each code point stands for.
        work: see `work.new_sketch_work`; overwritten.
        bands: how many.
        rows: bins of each.
        bar: documents are sampled whose least other hash is below.
        most: bytes of the longest document that is sampled.
        kept: (documents, `WORDS`), 4 bits a bin; written.
        keys: (documents, bands), a hash of each band; written.
        least: the least other hash of a document's n-grams, all ones where it has none; written.
        sampled: the distinct hashes of the documents that are sampled; written.
        ends: where those of each document end; written.
    """
    piece_work, bins, full, band_values, table = work
    begins = U0
    for document in range(U(starts.size - 1)):
        at, end = U(starts[document]), U(starts[document + U1])
        may_be_drawn = end - at <= U(most)
        for number in range(U(BINS)):
            bins[number] = EMPTY
        lowest, place = EMPTY, begins
        reset(piece_work[0])
        while True:
            before = place
            at, place = next_ngrams(text, at, end, letters, piece_work, sampled, place)
            for number in range(before, place):
                x = sampled[number]
                bins[x & LAST_BIN] = min(bins[x & LAST_BIN], x >> U8)
                x *= ANOTHER
                lowest = min(lowest, x ^ (x >> U32))
            if not may_be_drawn:
                place = begins
            if at >= end:
                break
        least[document] = lowest
        if may_be_drawn and lowest < bar:
            begins = keep_distinct(sampled, begins, place, table)
        ends[document] = begins
        filled = pack(bins, full, kept, document)
        for band in range(U(bands)):
            keys[document, band] = 0
        if filled == U0:
            continue
        for number in range(U(bands * rows)):
            band_values[number] = bins[number]
            if bins[number] == EMPTY:
                band_values[number] = bins[seek(bins, full, filled, number)]
        for band in range(U(bands)):
            key = (band + U1) * MIXER
            for row in range(U(rows)):
                key = (key ^ band_values[band * U(rows) + row]) * PRIME
                key ^= key >> U29
            keys[document, band] = mixed(key) >> U32


@loop
def pack(bins, full, kept, document):
    """Write 4 bits of each bin, and which bins are full; return how many."""
    filled = U0
    for word in range(U(WORDS)):
        packed = U0
        for place in range(U(NIBBLES)):
            value = bins[word * U(NIBBLES) + place]
            there = U(value != EMPTY)
            full[filled] = word * U(NIBBLES) + place
            filled += there
            packed |= ((U1 + (((value & LOW) * U15) >> U16)) * there) << (U4 * place)
        kept[document, word] = packed
    return filled


@loop
def keep_distinct(hashes, begin, end, table):
    """Keep each of the hashes from `begin` to `end` once, in their order; return where they end.

    Args:
        hashes: changed.
        begin: where they begin.
        end: where they end.
        table: at least two places a hash; overwritten.
    """
    size = U2 * (end - begin)
    for place in range(size):
        table[place] = EMPTY
    kept = begin
    for number in range(begin, end):
        x = hashes[number]
        place = ((x >> U32) * size) >> U32
        while table[place] != EMPTY and table[place] != x:
            place = place + U1 if place + U1 < size else U0
        hashes[kept] = x
        kept += U(table[place] == EMPTY)
        table[place] = x
    return kept


@loop
def count_ngrams(text, starts, letters, work, hashes):
    """Return how many n-grams documents have together.

    Args:
        text: bytes of all of them.
        starts: where each begins, and where the last ends.
        letters: what each code point stands for.
        work: see `work.new_work`; overwritten.
        hashes: see `work.new_hashes`; overwritten.
    """
    total = U0
    for document in range(U(starts.size - 1)):
        at, end = U(starts[document]), U(starts[document + U1])
        reset(work[0])
        while True:
            at, count = next_ngrams(text, at, end, letters, work, hashes, U0)
            total += count
            if at >= end:
                break
    return np.int64(total)


@loop
def root(parent, member):
    """Return the first member of a set, and shorten the way to it."""
    while parent[member] != member:
        parent[member] = parent[parent[member]]
        member = parent[member]
    return member


@loop
def unite(parent, one, two):
    """Make one set of two; its first member is the lower one of theirs."""
    a, b = root(parent, one), root(parent, two)
    parent[max(a, b)] = min(a, b)


@loop
def link(ranked, order, kept, cut, parent):
    """Join the documents of a band that have one key and are as similar as wanted.

    Each is compared with those of its key that came before it and joined none, the first
    `MOST_LEADERS` of them.

    Args:
        ranked: key of the band in the upper half, rank of the document in the lower, sorted.
        order: document of each rank.
        kept: sketch of each document.
        cut: least estimated Jaccard index.
        parent: a forest of ranks; changed.
    """
    leaders = np.empty(MOST_LEADERS, np.int64)
    count = 0
    for place in range(ranked.size):
        if place == 0 or ranked[place] >> U32 != ranked[place - 1] >> U32:
            count = 0
        member = np.int64(ranked[place] & HALF)
        joined = False
        for number in range(count):
            leader = leaders[number]
            if root(parent, member) != root(parent, leader):
                if estimate(kept[order[member]], kept[order[leader]]) < cut:
                    continue
                unite(parent, member, leader)
            joined = True
            break
        if not joined and count < MOST_LEADERS:
            leaders[count] = member
            count += 1


@loop
def keep_first(ranked, order, kept, cut, fell_for):
    """Keep the first documents of each set that are not similar to one kept before.

    A chain of similar documents has ends that are not: a document falls only for one that it is
    itself similar to, of the last `MOST_KEPT` kept of its set.

    Args:
        ranked: set of the document in the upper half, its rank in the lower, sorted.
        order: document of each rank.
        kept: sketch of each document.
        cut: least estimated Jaccard index.
        fell_for: rank of the document for which each rank falls, its own where it stays; written.
    """
    stays = np.empty(MOST_KEPT, np.int64)
    count = 0
    for place in range(ranked.size):
        if place == 0 or ranked[place] >> U32 != ranked[place - 1] >> U32:
            count = 0
        member = np.int64(ranked[place] & HALF)
        fell_for[member] = member
        for number in range(min(count, MOST_KEPT)):
            if estimate(kept[order[member]], kept[order[stays[number]]]) >= cut:
                fell_for[member] = stays[number]
                break
        if fell_for[member] == member:
            stays[count % MOST_KEPT] = member
            count += 1


@loop
def flatten(parent):
    """Let each member know the first one of its set."""
    for member in range(parent.size):
        parent[member] = root(parent, member)


@loop
def ask(blocks, hashes, number, count):
    """Ask the memory for the block of an n-gram that is read soon."""
    later = min(number + AHEAD, count - U1)
    fetch(blocks, block_of(blocks, hashes[later]))  # pyright: ignore[reportCallIssue]


@loop
def sift(blocks, text, starts, letters, work, hashes, share, inserted, most, falls):
    """Find passages whose n-grams are in a Bloom filter, and insert those of the others.

    A block is asked for `AHEAD` n-grams before it is read: the memory answers meanwhile. N-grams
    are looked up until so many are missing that the passage stays: of new text a fifth, where
    `share` is 0.8.

    Args:
        blocks: the filter; changed.
        text: bytes of all passages.
        starts: where each begins, and where the last ends.
        letters: what each code point stands for.
        work: see `work.new_work`; a passage with fewer words than an n-gram stays, and is not
            inserted.
        hashes: see `work.new_hashes`, for those of the longest passage; overwritten.
        share: share of a passage's n-grams from which it falls.
        inserted: n-grams of the filter so far.
        most: n-grams that it has room for.
        falls: 1 for each passage that falls; written.

    Returns:
        how many n-grams were inserted by then; more than `most` ends it.
    """
    state = work[0]
    n = U(state.size - HEAD)
    for passage in range(U(starts.size - 1)):
        at, end, count = U(starts[passage]), U(starts[passage + U1]), U0
        falls[passage] = 0
        reset(state)
        while at < end:
            at, count = next_ngrams(text, at, end, letters, work, hashes, count)
        if state[SEEN] < n:
            continue
        number, missing = U0, U0
        while number < count and count - missing >= share * count:
            ask(blocks, hashes, number, count)
            missing += U1 - is_in(blocks, hashes[number])
            number += U1
        if count - missing >= share * count:
            falls[passage] = 1
            continue
        for number in range(count):
            ask(blocks, hashes, number, count)
            inserted += np.int64(insert(blocks, hashes[number]))
        if inserted > most:
            return inserted
    return inserted

"""Compile the way from bytes of UTF-8 to hashes of word n-grams; see native.py.

It goes by pieces of some thousand bytes, so that a document of any length takes the same memory:
characters become letters, as UTF-8 too, with a 0 between words; words become hashes, 8 bytes at a
time, and these become hashes of n-grams. 32 characters of ASCII become letters at once, and 64
bytes of letters say at once where words begin and end. Indices are unsigned, for which Numba asks
no question.
"""

import numpy as np
from numba import njit

from headrace.data.quality.lanes import (
    FOLDED,
    LOOKED_AT,
    eight_bytes,
    first_bit,
    fold,
    letter_bits,
)
from headrace.data.quality.letters import ALONE, LETTERS, SKIP
from headrace.data.quality.work import HEAD, KEPT, PIECE, ROLLED, SEEN, WORD

U = np.uint64
PRIME, MIXER = U(0x9E3779B97F4A7C15), U(0xD6E8FEB86659FD93)
CHUNK = U(0xE7037ED1A0B428DB)
U0, U1, U2, U3, U4, U6, U8, U12, U18, U32, U63, U64 = map(
    U, (0, 1, 2, 3, 4, 6, 8, 12, 18, 32, 63, 64)
)
EVERY_BIT = U(0xFFFFFFFFFFFFFFFF)
ASCII_STEP, STEP = U(FOLDED), U(LOOKED_AT)
loop = njit(nogil=True, no_cfunc_wrapper=True)  # pyright: ignore[reportCallIssue]
"""Compiles a function that runs without the interpreter's lock, and that no C code calls."""


@loop
def mixed(x):
    """Return a hash of 64 bits, each of which depends on all bits of `x`."""
    x = (x ^ (x >> U32)) * MIXER
    x = (x ^ (x >> U32)) * MIXER
    return x ^ (x >> U32)


@loop
def write_letter(spelled, count, code):
    """Write a code point as UTF-8; return the place behind it."""
    if code < 0x80:
        spelled[count] = code
        return count + U1
    last = 0x80 | code & 0x3F
    if code < 0x800:
        spelled[count], spelled[count + U1] = 0xC0 | code >> 6, last
        return count + U2
    third = 0x80 | code >> 6 & 0x3F
    if code < 0x10000:
        spelled[count], spelled[count + U1] = 0xE0 | code >> 12, third
        spelled[count + U2] = last
        return count + U3
    spelled[count], spelled[count + U1] = 0xF0 | code >> 18, 0x80 | code >> 12 & 0x3F
    spelled[count + U2], spelled[count + U3] = third, last
    return count + U4


@loop
def spell_one(text, at, letters, spelled, count):
    """Write what one character stands for; return the places behind it, and behind the letters."""
    code = np.int64(text[at])
    if code < 0x80:
        spelled[count] = letters[code]
        return at + U1, count + U1
    second = np.int64(text[at + U1]) & 0x3F
    if code < 0xE0:
        code = (code & 0x1F) << 6 | second
        at += U2
    elif code < 0xF0:
        code = (code & 0x0F) << 12 | second << 6 | np.int64(text[at + U2]) & 0x3F
        at += U3
    else:
        third, fourth = np.int64(text[at + U2]) & 0x3F, np.int64(text[at + U3]) & 0x3F
        code = (code & 0x07) << 18 | second << 12 | third << 6 | fourth
        at += U4
    alone = True
    if code < LETTERS:
        code = np.int64(letters[code])
        alone = code >= ALONE
        code &= ALONE - 1
    if alone:
        spelled[count] = 0
        count = write_letter(spelled, count + U1, code)
        spelled[count] = 0
        count += U1
    elif code != SKIP:
        count = write_letter(spelled, count, code)
    return at, count


@loop
def spell(text, at, end, letters, spelled, count):
    """Write what the UTF-8 characters of a piece stand for; 0 is a break between words.

    Args:
        text: bytes of many documents.
        at: where the piece begins.
        end: no character begins there or behind it.
        letters: what each code point stands for.
        spelled: written; a character that is a word of its own has breaks around it. `LOOKED_AT`
            breaks stand behind the last.
        count: where to write.

    Returns:
        the place behind the last character, and that behind the last letter.
    """
    while at < end:
        fits = at + ASCII_STEP <= end
        if fits and fold(text, at, spelled, count):  # pyright: ignore[reportCallIssue]
            at += ASCII_STEP
            count += ASCII_STEP
            continue
        stop = min(end, at + ASCII_STEP)
        while at < stop:
            at, count = spell_one(text, at, letters, spelled, count)
    for place in range(count, count + STEP):
        spelled[place] = 0
    return at, count


@loop
def with_chunk(word, chunk):
    """Return the hash of a word with up to 8 bytes more."""
    x = (word ^ chunk) * CHUNK
    return x ^ (x >> U32)


@loop
def with_bytes(word, spelled, begin, end):
    """Return the hash of a word with more bytes, and where its last 8 or fewer begin."""
    while end - begin > U8:
        word = with_chunk(word, eight_bytes(spelled, begin))  # pyright: ignore[reportCallIssue]
        begin += U8
    return word, begin


@loop
def hash_words(spelled, count, is_last, state, run, length):
    """Write the hash of each word that ends in a piece.

    Args:
        spelled: letters, 0 for a break; of a word that goes on in the next piece the last bytes are
            moved to the beginning.
        count: how many bytes.
        is_last: whether the document ends with them.
        state: that of the document; changed.
        run: written from `length` on.
        length: where the first one stands.

    Returns:
        the place behind the last hash.
    """
    limit, word, begin, before, block = count + U(is_last), state[WORD], U0, U0, U0
    while block < limit:
        bits = letter_bits(spelled, block)  # pyright: ignore[reportCallIssue]
        moved = bits << U1 | before
        starts, ends = bits & ~moved, moved & ~bits
        if limit - block < U64:
            ends &= (U1 << (limit - block)) - U1
        if before == U0:
            begin = block + first_bit(starts)  # pyright: ignore[reportCallIssue]
            starts &= starts - U1
        while ends != U0:
            end = block + first_bit(ends)  # pyright: ignore[reportCallIssue]
            ends &= ends - U1
            word, begin = with_bytes(word, spelled, begin, end)
            last = eight_bytes(spelled, begin)  # pyright: ignore[reportCallIssue]
            run[length] = with_chunk(word, last & (EVERY_BIT >> (U64 - ((end - begin) << U3))))
            length += U1
            word = U0
            begin = block + first_bit(starts)  # pyright: ignore[reportCallIssue]
            starts &= starts - U1
        before = bits >> U63
        block += STEP
    kept = U0
    if not is_last and count > U0 and spelled[count - U1] != 0:
        word, begin = with_bytes(word, spelled, begin, count)
        kept = count - begin
        for place in range(kept):
            spelled[place] = spelled[begin + place]
    state[WORD], state[KEPT] = word, kept
    return length


@loop
def reset(state):
    """Make the state that of a new document."""
    for place in range(U(state.size)):
        state[place] = U0


@loop
def next_ngrams(text, at, end, letters, work, hashes, place):
    """Write the hashes of the n-grams that end in the next piece of a document.

    A document with fewer words than an n-gram has one, of all of them, with its last piece.

    Args:
        text: bytes of many documents.
        at: where the piece begins.
        end: where the document ends.
        letters: what each code point stands for.
        work: see `work.new_work`; its state is that of this document, and changed.
        hashes: written from `place` on, `work.MOST_NEW` at most.
        place: where the first one stands.

    Returns:
        where the next piece begins, and the place behind the last hash.
    """
    state, spelled, run = work
    n = U(state.size - HEAD)
    at, count = spell(text, at, min(end, at + U(PIECE)), letters, spelled, state[KEPT])
    for number in range(n):
        run[number] = state[U(HEAD) + number]
    length = hash_words(spelled, count, at >= end, state, run, n)
    outgoing = U1
    for _ in range(n):
        outgoing *= PRIME
    rolled, seen = state[ROLLED], state[SEEN] + length - n
    first = n + n - min(n, state[SEEN] + U1)
    for number in range(n, length):
        rolled = rolled * PRIME + run[number] - run[number - n] * outgoing
        hashes[place] = mixed(rolled)
        place += U(number >= first)
    for number in range(n):
        state[U(HEAD) + number] = run[length - n + number]
    state[ROLLED], state[SEEN] = rolled, seen
    if at >= end and U0 < seen < n:
        hashes[place] = mixed(rolled + seen)
        place += U1
    return at, place

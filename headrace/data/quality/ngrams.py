"""Compile the way from bytes of UTF-8 to hashes of word n-grams; see native.py.

It goes by pieces of some thousand bytes, so that a document of any length takes the same memory:
characters become letters, of which 0 stands between words, letters become hashes of words, and
these become hashes of n-grams. Every step writes into buffers and decides nothing by a branch that
a processor could not guess; two runs of words are hashed beside each other, for each hash waits for
the one before it. Indices are unsigned, for which Numba asks no question.
"""

import numpy as np
from numba import njit

from headrace.data.quality.letters import ALONE, LETTERS, SKIP
from headrace.data.quality.work import HEAD, PIECE, ROLLED, SEEN, WORD

U = np.uint64
PRIME, MIXER = U(0x9E3779B97F4A7C15), U(0xD6E8FEB86659FD93)
CHARACTER = U(0x100000001B3)
U0, U1, U2, U3, U4, U32 = map(U, (0, 1, 2, 3, 4, 32))
loop = njit(nogil=True, no_cfunc_wrapper=True)  # pyright: ignore[reportCallIssue]
"""Compiles a function that runs without the interpreter's lock, and that no C code calls."""


@loop
def mixed(x):
    """Return a hash of 64 bits, each of which depends on all bits of `x`."""
    x = (x ^ (x >> U32)) * MIXER
    x = (x ^ (x >> U32)) * MIXER
    return x ^ (x >> U32)


@loop
def spell(text, at, end, letters, spelled):
    """Write what the UTF-8 characters of a piece stand for; 0 is a break between words.

    Args:
        text: bytes of many documents.
        at: where the piece begins.
        end: no character begins there or behind it.
        letters: what each code point stands for.
        spelled: written; a character that is a word of its own has breaks around it.

    Returns:
        the place behind the last character, and how many letters were written.
    """
    count = U0
    while at < end:
        lead = text[at]
        if lead < 0x80:
            spelled[count] = letters[lead]
            count += U1
            at += U1
            continue
        code, second = np.int64(lead), np.int64(text[at + U1]) & 0x3F
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
        if alone:
            spelled[count], spelled[count + U1], spelled[count + U2] = 0, code, 0
            count += U3
        elif code != SKIP:
            spelled[count] = code
            count += U1
    return at, count


@loop
def joined(word, letter):
    """Return the hash of a word with one more letter, 0 behind a break."""
    return ((word ^ U(letter)) * CHARACTER) & (U0 - U(letter != 0))


@loop
def hash_words(spelled, count, word, words):
    """Write the hash of the word before each break, 0 where there is none.

    Args:
        spelled: letters, 0 for a break.
        count: how many.
        word: hash of the word that they go on with.
        words: written.

    Returns:
        how many were written, and the hash of the word that is not finished.
    """
    half = count >> U1
    while half < count and spelled[half] != 0:
        half += U1
    one, two, first, second, other = U0, half, U0, half, U0
    while one < half and two < count:
        a, b = spelled[one], spelled[two]
        words[first], words[second] = word, other
        first += U(a == 0)
        second += U(b == 0)
        word, other = joined(word, a), joined(other, b)
        one += U1
        two += U1
    while one < half:
        words[first] = word
        first += U(spelled[one] == 0)
        word = joined(word, spelled[one])
        one += U1
    if half == count:
        return first, word
    while two < count:
        words[second] = other
        second += U(spelled[two] == 0)
        other = joined(other, spelled[two])
        two += U1
    words[half] = word  # in the place of the nothing before the break there
    while half < second:
        words[first] = words[half]
        first += U1
        half += U1
    return first, other


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
    state, spelled, words, run = work
    n = U(state.size - HEAD)
    at, count = spell(text, at, min(end, at + U(PIECE)), letters, spelled)
    count, word = hash_words(spelled, count, state[WORD], words)
    if at >= end:
        words[count] = word
        count += U1
        word = U0
    state[WORD] = word
    for number in range(n):
        run[number] = state[U(HEAD) + number]
    length = n
    for number in range(count):
        run[length] = words[number]
        length += U(words[number] != U0)
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

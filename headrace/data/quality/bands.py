"""Choose how sketches are cut into bands, and predict what that finds, before any text is read.

Two documents become a candidate pair where all rows of one band agree, with probability
1 - (1 - J^rows)^bands at Jaccard index J: the S-curve (Leskovec, Rajaraman, Ullman, Mining of
Massive Datasets, 3.4). A candidate is a pair where the Jaccard index that the sketches estimate
reaches `cut`, which lies so far below the threshold that it loses hardly a true pair, and so far
above `NEVER` that it takes none from there.
"""

from dataclasses import dataclass
from math import ceil, erf, exp, log, sqrt

BINS = 256
"""Bins of a sketch, a power of 2; bands read the first of them."""
BITS = 4
"""Bits that are kept of a bin to estimate a Jaccard index; 0 says that the bin is empty."""
SKETCH_BYTES = BINS * BITS // 8
NEVER = 0.5
"""Documents whose Jaccard index is lower are not merged."""
NEVER_SIGMAS, LOSS_SIGMAS = 4.8, 4.0
"""How many standard deviations the cut lies above `NEVER`, of which an estimate exceeds 4.8 in one
of a million pairs, and below the threshold at most: 4.0, one of 30,000."""
STRANGERS = 0.01
"""Largest share of the pairs at a quarter of the threshold that may become candidates."""
BLOCK_BITS, BLOCK_WORDS = 512, 8
"""Bits and words of a block of a Bloom filter, which is a cache line."""


@dataclass(frozen=True)
class Bands:
    """Bands of rows are chosen for a wanted recall of the pairs at a Jaccard index.

    Args:
        threshold: the Jaccard index.
        bands: how many.
        rows: bins that a band compares.
    """

    threshold: float
    bands: int
    rows: int

    def candidates(self, jaccard: float) -> float:
        """Return the share of pairs with this Jaccard index that become candidates."""
        return 1 - (1 - jaccard**self.rows) ** self.bands

    @property
    def cut(self) -> float:
        """Return the estimated Jaccard index from which a candidate pair is merged."""
        below = self.threshold - LOSS_SIGMAS * deviation(self.threshold)
        return max(below, NEVER + NEVER_SIGMAS * deviation(NEVER))

    def merged(self, jaccard: float) -> float:
        """Return the share of pairs with this Jaccard index that are found and merged."""
        sigma = deviation(jaccard)
        if sigma == 0:
            return self.candidates(jaccard) * (jaccard >= self.cut)
        passes = (1 + erf((jaccard - self.cut) / sigma / sqrt(2))) / 2
        return self.candidates(jaccard) * passes


def deviation(jaccard: float) -> float:
    """Return the standard deviation of an estimate of a Jaccard index from whole sketches.

    Of bins that differ one in 15 looks equal by chance. Documents with few n-grams leave bins
    empty, and are estimated better than this.
    """
    chance = 1 / (2**BITS - 1)
    equal = jaccard + (1 - jaccard) * chance
    return sqrt(equal * (1 - equal) / BINS) / (1 - chance)


def choose_bands(threshold: float, recall: float) -> Bands:
    """Return the fewest bands that find this share of the pairs at the threshold.

    Fewer rows need fewer bands and let more strangers in: the fewest rows are taken that let in no
    more than `STRANGERS`, or the most for which the bins suffice.

    Args:
        threshold: a Jaccard index below 1.
        recall: a share below 1.
    """
    fitting = []
    for rows in range(1, BINS + 1):
        bands = ceil(log(1 - recall) / log(1 - threshold**rows))
        if bands * rows > BINS:
            break
        fitting.append(Bands(threshold, bands, rows))
    selective = [b for b in fitting if b.candidates(threshold / 4) <= STRANGERS]
    return selective[0] if selective else fitting[-1]


def bloom_rate(bits_per_item: float) -> float:
    """Return the false-positive rate of a Bloom filter of blocks, each as long as a cache line.

    An item sets a bit in each of the `BLOCK_WORDS` words of 64 bits of one block.

    Source: Putze, Sanders, Singler, Cache-, Hash- and Space-Efficient Bloom Filters (2007), eq. 3.

    Args:
        bits_per_item: of the whole filter.
    """
    mean = BLOCK_BITS / bits_per_item
    total, weight = 0.0, exp(-mean)
    for items in range(int(mean + 12 * sqrt(mean)) + 12):
        total += weight * (1 - (1 - BLOCK_WORDS / BLOCK_BITS) ** items) ** BLOCK_WORDS
        weight *= mean / (items + 1)
    return total

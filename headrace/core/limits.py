"""Bounds, choices and defaults that a verb offers before it loads what it works with.

The command line shows them in its help, so this module imports nothing that takes time.
"""

from typing import Literal

MOST = 10**15
"""Largest number of steps or tokens; about a thousand times what any model has been shown."""
LARGEST_BATCH = 1 << 36
"""Largest number of tokens or sequences of a step."""
WIDEST = 1 << 24
"""Largest number of features, positions or rows of an embedding; a matrix of it still counts."""
SweepAim = Literal["time", "money", "memory"]
"""What a sweep ranks plans by."""
TuneAim = Literal["time", "money", "memory", "quality"]
"""What a tuning makes less; `quality` is the time to a target loss."""
TUNE_MINUTES = 8.0
"""Minutes that a tuning takes at most, unless it is asked for others."""
TUNE_SEEDS = 7
"""Seeds over which a change of learning is tried at most. If all of them favor the change, their
signs alone suffice."""
LR_STEPS = 150
"""Steps of a range test of the learning rate, unless it is asked for others."""
FEWEST_LR_STEPS = 20
"""Fewest steps of a range test: with fewer the rate grows by half or more from one to the next."""
WIDEST_CHECKED = 512
"""Widest model of a coordinate check, in features, unless it is asked for another."""
TokenizerPattern = Literal["nanochat", "gpt2", "gpt4", "qwen"]
"""Rule by which text falls into words before a tokenizer is trained on them."""
TokenizerText = Literal["sample", "all"]
"""Text that a tokenizer is trained on: a sample of it, or the counted words of all of it."""
TextGrouping = Literal["source", "script"]
"""How texts are grouped on which tokenizers are compared: every file or data set apart, or by the
script that most letters are of."""
TRAINED_VOCAB = 32768
"""Entries of a tokenizer that `data tokenizer` trains, unless it is asked for others."""

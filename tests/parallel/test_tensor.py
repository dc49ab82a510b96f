"""Compare collectives with gradients, and reductions over a split vocabulary, with one process."""

from pathlib import Path
from typing import Any

import pytest

FUNCTIONS = Path(__file__).with_name("tensor_ranks.py")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (2, ""),
        pytest.param(4, "", marks=SLOW),
        *(pytest.param(*how, marks=SLOW) for how in ((2, "aot_eager"), (4, "aot_eager"))),
        pytest.param(2, "inductor", marks=SLOW),
    ],
)
@pytest.mark.parametrize("function", ["sequences", "vocabularies"])
def test_split_equals_whole(
    zygote: Any, tmp_path: Path, function: str, ranks: int, backend: str
) -> None:
    zygote.call(ranks, tmp_path, FUNCTIONS, function, backend=backend)

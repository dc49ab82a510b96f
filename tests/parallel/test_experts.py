"""Compare experts that ranks divide with all of them in one process, whoever gets a token."""

from pathlib import Path
from typing import Any

import pytest

FUNCTIONS = Path(__file__).with_name("expert_ranks.py")
SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("ranks", "backend"),
    [
        (4, ""),
        pytest.param(2, "", marks=SLOW),
        pytest.param(2, "aot_eager", marks=SLOW),
        pytest.param(2, "inductor", marks=SLOW),
    ],
)
def test_divided_equals_whole(zygote: Any, tmp_path: Path, ranks: int, backend: str) -> None:
    zygote.call(ranks, tmp_path, FUNCTIONS, "experts", backend=backend)

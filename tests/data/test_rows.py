"""The baseline's cut: every token but the first is a target exactly once."""

from collections.abc import Callable

import numpy as np
import pytest
from facts import in_order

from headrace.core.errors import ConfigError
from headrace.data.rows import Cut
from headrace.data.shards import Shards

Make = Callable[..., Shards]


@pytest.mark.parametrize("length", [2, 7, 100, 128])
def test_cuts_tile_the_stream(make_shards: Make, length: int) -> None:
    parts = make_shards([30, 0, 77, 41]), make_shards([200])
    cut = Cut(parts, length)
    assert cut.units == tuple((p.tokens - 1) // length for p in parts)
    for source, part in enumerate(parts):
        stream = part.read(0, part.tokens)
        rows = [cut.row(source, unit) for unit in range(cut.units[source])]
        assert all(len(row.ids) == length + 1 and row.targets is None for row in rows)
        targets = np.concatenate([row.ids[1:] for row in rows])
        assert (targets == stream[1 : 1 + len(targets)]).all()
        assert part.tokens - 1 - len(targets) < length
        for row in rows:
            assert (row.starts == np.flatnonzero(row.ids == 0)).all()


def test_shorter_than_a_row(make_shards: Make) -> None:
    shards = make_shards([9])
    assert Cut([shards], 9).units == (1,)
    with pytest.raises(ConfigError, match=in_order("10 tokens", "one row", "11 tokens")) as error:
        Cut([shards], 10)
    assert "data.sequence_length=8" in str(error.value)

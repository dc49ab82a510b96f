"""A point's time is forecast from the shapes and formats of its matrices, each timed once."""

from typing import Any

import pytest
from test_quantized_model import decoder

from headrace.compress import latency
from headrace.compress.latency import DecodeForecast
from headrace.compress.spec import PRESETS


@pytest.mark.parametrize("tied", [False, True])
def test_what_matrices_take_is_replaced(tied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fp32 take 3 s and codes 5 s: every matmul adds 2 s, and so does a lookup."""
    pytest.importorskip("torchao")
    timed: list[str] = []

    def time(run: Any) -> float:
        cells = dict(zip(run.__code__.co_freevars, run.__closure__, strict=True))
        kind = type(cells["weight"].cell_contents).__name__
        run()
        timed.append(kind)
        return 3.0 if kind == "Parameter" else 5.0

    monkeypatch.setattr(latency, "_median_s", time)
    model = decoder("gpt2" if tied else "llama")
    found = DecodeForecast(model, 100.0)
    matmuls = sum(1 for name in latency.matrices_of(model) if name != "embed.weight") + tied
    assert found.seconds(PRESETS["int8"]) == 100 + 2 * (matmuls + 1)
    shapes = len(timed)
    assert found.seconds(PRESETS["int8"]) == 100 + 2 * (matmuls + 1)
    assert len(timed) == shapes < 2 * (matmuls + 1), "a shape is timed once"
    assert DecodeForecast(model, 1e-9).seconds(PRESETS["int8"]) > 0

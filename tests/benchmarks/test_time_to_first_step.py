"""Check that the time until the first step is read at the first update, and compared in pairs."""

from pathlib import Path
from typing import Any

import pytest
from first_step import Side, measure

FAKE = """
import sys
import torch
one = torch.nn.Parameter(torch.ones(1))
one.grad = torch.ones(1)
if sys.argv[1:2] == ["train"]:
    torch.optim.SGD([one], lr=0.1).step()
    sum(i * i for i in range(1_000_000))
"""
"""A package that takes one step, and works on after it."""


@pytest.mark.slow
def test_the_time_is_read_at_the_first_update(tmp_path: Path) -> None:
    (tmp_path / "headrace").mkdir()
    (tmp_path / "headrace" / "__init__.py").touch()
    (tmp_path / "headrace" / "__main__.py").write_text(FAKE)
    side = Side(tmp_path, tmp_path)
    first_s = side.first_step_s()
    assert 0 < first_s < side.commands_s[0], "the command works on after its update"
    assert len(side.help_s) == 1
    (tmp_path / "headrace" / "__main__.py").write_text("raise SystemExit('broken')")
    with pytest.raises(SystemExit, match="broken"):
        side.first_step_s()


def test_a_known_difference_is_found() -> None:
    class Known:
        def __init__(self, first_s: float) -> None:
            self.first_s, self.commands_s, self.help_s = first_s, [], []  # type: ignore[var-annotated]
            self.drift = 1.0

        def warm(self) -> None:
            self.first_step_s()
            self.commands_s.clear()
            self.help_s.clear()

        def first_step_s(self) -> float:
            self.drift *= 1.001
            self.commands_s.append(2 * self.first_s * self.drift)
            self.help_s.append(0.2)
            return self.first_s * self.drift

    before: Any = Known(10.0)
    after: Any = Known(9.0)
    pairs, metrics = measure(before, after, 3)
    assert pairs == 6
    assert metrics["overhead"]["value"] == pytest.approx(-0.1, abs=0.002)
    assert metrics["whole_command"]["low"] <= -0.1 + 0.002 and metrics["help_cpu_s"]["value"] == 0.2

"""Constants of the cost model say what they are, and each is read."""

from pathlib import Path

import pytest

from headrace.costs.constants import CONSTANTS, Constant

ROOT = Path(__file__).parents[2]
SOURCE = "\n".join(path.read_text() for path in (ROOT / "headrace").rglob("*.py"))


@pytest.mark.parametrize(("name", "constant"), CONSTANTS.items(), ids=CONSTANTS)
def test_a_constant_has_a_unit_a_source_a_program_and_a_reader(
    name: str, constant: Constant
) -> None:
    assert constant.unit and constant.source.strip()
    assert f'("{name}"' in SOURCE.replace("(\n        ", "(")
    if constant.program:
        assert (ROOT / constant.program).is_file()

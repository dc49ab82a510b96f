"""What a folder of trials holds: lines that were damaged are none."""

from pathlib import Path

import pytest

from headrace.plan.plan import Plan
from headrace.tuner.readings import Reading
from headrace.tuner.store import Store


@pytest.mark.parametrize(
    "line",
    [
        b'{"reading": {"seco',
        b'"x"\n',
        b"\xff\xfe\n",
        b"[]\n",
        b'{"reading": 3, "seconds": 1}\n',
        b'{"reading": {"seconds": "x"}, "seconds": 1, "here": {}}\n',
    ],
)
def test_a_damaged_line_is_none_and_the_others_stand(
    line: bytes, plan: Plan, tmp_path: Path
) -> None:
    file = tmp_path / "trials.jsonl"

    def ask(name: str) -> tuple[Reading, bool]:
        fresh: list[bool] = []

        def measured() -> Reading:
            fresh.append(True)
            return Reading([1.0], losses=[2.0])

        told = Store(file, {}).once(
            {"target": name}, measured, limit_s=9.0, alike_s=0.0, repeat=False
        )
        return told, bool(fresh)

    assert ask("before")[1]
    with file.open("ab") as opened:
        opened.write(line)
    assert ask("after")[1]
    for name in ("before", "after"):
        told, fresh = ask(name)
        assert told.seconds == [1.0] and not fresh

"""Every number of report.json is on the page: change one alone, and the page must change."""

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

from headrace.report.single import write_report

UNSHOWN = {("format",), ("val", "step")}
"""The layout of the file, and where the charts have tokens and seconds in its place."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], float]]:
    """Every number with its path; of a list the last entry stands for all."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from leaves(inner, (*path, key))
    elif isinstance(value, list) and value:
        yield from leaves(value[-1], (*path, len(value) - 1))
    elif isinstance(value, int | float) and not isinstance(value, bool):
        yield path, value


def with_changed(values: dict[str, Any], path: tuple[Any, ...]) -> dict[str, Any]:
    """A copy in which one number is another."""
    changed = deepcopy(values)
    table: Any = changed
    for key in path[:-1]:
        table = table[key]
    was = table[path[-1]]
    table[path[-1]] = was + max(1, was // 3) if isinstance(was, int) else was * 1.37
    return changed


def test_no_number_stands_in_the_place_of_another(make_run: Callable[..., Path]) -> None:
    run = make_run()
    values = json.loads((run / "report.json").read_text())
    values["peak_memory_bytes"]["reserved"] = 471 * 2**20
    values |= {"restarts": 2, "skipped_steps": 5}

    def page(changed: dict[str, Any]) -> str:
        (run / "report.json").write_text(json.dumps(changed))
        return write_report(run).read_text()

    before = page(values)
    unseen = [
        ".".join(map(str, path))
        for path, _ in leaves(values)
        if tuple(key for key in path if isinstance(key, str)) not in UNSHOWN
        and page(with_changed(values, path)) == before
    ]
    assert not unseen


def test_the_best_loss_is_told_beside_the_last(make_run: Callable[..., Path]) -> None:
    """Check that the report shows the lowest loss as the best where the last is higher."""
    run = make_run()
    values = json.loads((run / "report.json").read_text())
    first, last = values["val"][0], values["val"][-1]
    first["bits_per_byte"], last["bits_per_byte"] = 1.1234, 1.9876
    (run / "report.json").write_text(json.dumps(values))
    page = write_report(run).read_text()
    assert "best 1.123" in page and "best 1.98" not in page

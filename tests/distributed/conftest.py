"""Compositions are run by 4 or 8 ranks that join once; the tests read what they computed."""

import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import house
import pytest
from composition import Composition, Outcome
from safetensors.torch import load_file

from headrace.plan.mesh_config import MeshConfig

HERE = Path(__file__).parent
LONGEST_S = 3600
"""Seconds of the test that asks first: every composition that was collected runs then."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give tests that read compositions the time of all of them."""
    for item in items:
        if "told" in getattr(item, "fixturenames", ()):
            item.add_marker(pytest.mark.timeout(LONGEST_S))


@pytest.fixture(scope="session", autouse=True)
def data(corpus: Path, prepared_folder: Path) -> None:
    """Prepare the corpus of all tests before the ranks need it."""
    house.put_data_in(str(corpus), str(prepared_folder))


class Told:
    """Hold what the ranks wrote of one composition."""

    def __init__(self, folder: Path, ranks: int) -> None:
        self.ranks = [
            json.loads(path.read_text())
            if (path := folder / f"{r}.json").exists()
            else {"error": "the rank ended before it said anything"}
            for r in range(ranks)
        ]
        self.errors = [r["error"] for r in self.ranks if "error" in r]
        self.refusals = [r["refused"] for r in self.ranks if "refused" in r]
        self._folder = folder

    def outcome(self) -> Outcome:
        """Put the stages' parts together."""
        tensors: dict[str, Any] = {}
        for path in sorted(self._folder.glob("*.safetensors")):
            tensors |= load_file(path)
        parts = {
            kind: {n.split(" ", 1)[1]: t for n, t in tensors.items() if n.startswith(kind)}
            for kind in ("gradients", "weights")
        }
        return Outcome(self.ranks[0]["losses"], **parts)


@pytest.fixture(scope="session")
def told(
    request: pytest.FixtureRequest,
    zygote: Any,
    corpus: Path,
    prepared_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[Composition], Told]]:
    """What the ranks said; every composition that was collected is run at the first question."""
    folder = tmp_path_factory.mktemp("compositions")
    wanted = {
        item.callspec.params["composition"].name: item.callspec.params["composition"]
        for item in request.session.items
        if isinstance(item, pytest.Function)
        and hasattr(item, "callspec")
        and isinstance(item.callspec.params.get("composition"), Composition)
    }
    prepared: set[int] = set()

    def ask(composition: Composition) -> Told:
        ranks = ranks_of(composition)
        if ranks not in prepared:
            prepared.add(ranks)
            mine = [c for c in wanted.values() if ranks_of(c) == ranks]
            _run_all(zygote, folder, mine, ranks, str(corpus), str(prepared_folder))
        return Told(folder / composition.name, ranks)

    yield ask
    shutil.rmtree(folder, ignore_errors=True)


def ranks_of(composition: Composition) -> int:
    """Return how many processes its mesh has, also where its techniques contradict each other."""
    return MeshConfig.model_validate(dict(composition.mesh)).ranks


def _run_all(
    zygote: Any, folder: Path, cases: list[Composition], ranks: int, corpus: str, prepared: str
) -> None:
    """Run the cases in one process group; a case that breaks the group is left out of the next."""
    from headrace.data.ingest import prepare

    for case in cases:
        prepare(case.plan())
    left = cases
    while left:
        arguments = {
            "folder": str(folder),
            "corpus": corpus,
            "prepared": prepared,
            "cases": [asdict(c) for c in left],
        }
        try:
            zygote.call(ranks, folder, HERE / "ranks.py", "serve", **arguments)
        except AssertionError as broken:
            begun = [c for c in left if (folder / c.name).exists()]
            culprit = folder / begun[-1].name / "0.json"
            if not culprit.exists():
                culprit.write_text(json.dumps({"error": str(broken)}))
        left = [c for c in left if not (folder / c.name).exists()]

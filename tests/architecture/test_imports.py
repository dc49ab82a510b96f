"""The import law: floors and their order, as docs/design.md draws them."""

import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

LINE = re.compile(r"  ((?:[a-z_]+(?:/|\.py) ?)+?) +(\d)  \S")


def _inside(name: str) -> bool:
    return name.split(".")[0] == "headrace" or name.startswith(".")


@pytest.fixture(scope="module")
def order(root: Path) -> dict[str, tuple[int, int]]:
    """Return (floor, place in the list) of every room, as the design page lists them."""
    house = (root / "docs" / "design.md").read_text().split("headrace/\n", 1)[1].split("```", 1)[0]
    rows = [LINE.match(line) for line in house.splitlines()]
    named = [(name.rstrip("/"), int(row[2])) for row in rows if row for name in row[1].split()]
    names = [(name.removesuffix(".py"), floor) for name, floor in named]
    return {name: (floor, place) for place, (name, floor) in enumerate(names)}


def test_the_design_lists_every_room(order: dict[str, tuple[int, int]], root: Path) -> None:
    rooms = {
        p.stem for p in (root / "headrace").iterdir() if p.stem[:2] != "__" and p.name != "py.typed"
    }
    assert set(order) - {"__main__"} == rooms
    floors = [floor for floor, _ in order.values()]
    assert floors == sorted(floors)


def test_nothing_imports_what_stands_later(
    imports: dict[str, set[str]], order: dict[str, tuple[int, int]]
) -> None:
    wrong = []
    for module, names in imports.items():
        room = module.split(".")[1] if "." in module else None
        for name in filter(_inside, names):
            target = name.split(".")[1] if "." in name else None
            if room is None or target is None or target == room:
                continue
            if order[target] >= order[room]:
                wrong.append(f"{module} imports {name}")
    assert not wrong


def test_data_imports_core_and_plan_only(imports: dict[str, set[str]]) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        if module.startswith("headrace.data")
        for name in filter(_inside, names)
        if name.split(".")[1] not in ("core", "plan", "data")
    ]
    assert not wrong


def test_there_are_no_cycles(imports: dict[str, set[str]]) -> None:
    graph = {m: {n for n in names if n in imports} - {m} for m, names in imports.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail(f"modules import each other: {' -> '.join(error.args[1])}")


def test_imports_are_absolute(imports: dict[str, set[str]]) -> None:
    assert not [m for m, names in imports.items() if any(n.startswith(".") for n in names)]


def test_nothing_imports_a_technique(imports: dict[str, set[str]]) -> None:
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        for name in names
        if name.startswith("headrace.techniques")
    ]
    assert not wrong  # `installed` finds them by the package's name


OF_A_BUILD = {
    f"headrace.assemble.{name}"
    for name in (
        "adapted",
        "sockets",
        "documents",
        "keyed",
        "scheduled",
        "clipping",
        "kept_states",
        "nonfinite",
        "references",
        "row_parts",
        "sliced",
        "teacher",
    )
}
"""What techniques share that works on a Build: none of these makes one."""


def test_a_technique_imports_neither_build_nor_train(imports: dict[str, set[str]]) -> None:
    allowed = {"core", "costs", "plan", "kernels", "parallel", "model", "optim", "data", "compress"}
    wrong = [
        f"{module} imports {name}"
        for module, names in imports.items()
        if module.startswith("headrace.techniques")
        for name in filter(_inside, names)
        if name.split(".")[1] not in allowed and name not in OF_A_BUILD
    ]
    assert not wrong


def test_core_costs_and_plan_import_no_torch(trees: dict[str, object]) -> None:
    rooms = ("core", "costs", "plan")
    modules = sorted(m for m in trees if m.partition(".")[2].partition(".")[0] in rooms)
    assert modules
    program = f"import sys, {', '.join(modules)}; sys.exit('torch' in sys.modules)"
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, check=False)
    assert ended.returncode == 0, ended.stderr.decode() or "one of them imports torch"


def test_importing_headrace_stays_cheap() -> None:
    program = (
        "import sys, headrace; from headrace import HeadraceError, Plan;"
        "assert callable(headrace.train) and callable(headrace.doctor);"
        "assert 'torch' not in sys.modules;"
        "import headrace.watch; assert not headrace.watch().report()['steps'];"
        "assert not hasattr(headrace, 'wotch')"
    )
    subprocess.run([sys.executable, "-c", program], check=True)


def test_the_catalogue_loads_no_compiler() -> None:
    """Check that loading the catalogue imports neither the compiler nor distributed tensors."""
    program = (
        "import sys, headrace.cli.catalogue; assert headrace.cli.catalogue.catalogue().techniques;"
        "print(*sorted({'torch._dynamo', 'torch.distributed.tensor'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout == "\n", f"the catalogue loads {ended.stdout}"

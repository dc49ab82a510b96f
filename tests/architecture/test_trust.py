"""What the package never does: read code, or be configured behind the plan's back."""

import ast
from pathlib import Path

import pytest
from trees import tree_of

FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "marshal", "shelve", "joblib"}
FORBIDDEN_CALLS = {
    "torch.load",
    "torch.save",
    "eval",
    "exec",
    "os.system",
    "yaml.load",
    "numpy.load",
    "np.load",
    "torch.hub.load",
    "dist.all_gather_object",
    "dist.broadcast_object_list",
    "dist.scatter_object_list",
    "dist.gather_object",
    "dist.recv_object_list",
}
FORBIDDEN_LAST = {name.rpartition(".")[2] for name in FORBIDDEN_CALLS}
"""What each ends in, which is read faster than the whole."""
FORBIDDEN_KEYWORDS = {"trust_remote_code", "allow_pickle", "shell"}
LAUNCHER_VARIABLES = {
    "RANK",
    "WORLD_SIZE",
    "LOCAL_RANK",
    "LOCAL_WORLD_SIZE",
    "MASTER_ADDR",
    "MASTER_PORT",
    "TORCHELASTIC_RESTART_COUNT",
    "SLURM_JOB_ID",
    "JOB_COMPLETION_INDEX",
    "SKYPILOT_TASK_ID",
    "HEADRACE_RUN",
}
"""What torchrun, schedulers and `headrace launch` tell their processes: the only environment that
is read."""
SWITCHES = {"TORCH_SYMM_MEM_DISABLE_MULTICAST"}
"""What a technique tells torch, which takes it from nowhere else; it is set and never read."""


def _findings(tree: ast.Module) -> list[str]:
    """What a module does that none may do."""
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names]
            base = node.module if isinstance(node, ast.ImportFrom) else None
            roots = {name.split(".")[0] for name in ([base] if base else names)}
            found += sorted(roots & FORBIDDEN_MODULES)
            found += [f"{base}.{n}" for n in names if f"{base}.{n}" in FORBIDDEN_CALLS]
        elif isinstance(node, ast.Call):
            last = getattr(node.func, "attr", getattr(node.func, "id", None))
            if last in FORBIDDEN_LAST and (called := ast.unparse(node.func)) in FORBIDDEN_CALLS:
                found.append(called)
            found += [k.arg for k in node.keywords if k.arg in FORBIDDEN_KEYWORDS]
    return found


def _variables(tree: ast.Module) -> list[str]:
    """Environment variables that a module reads; `?` where no literal says which."""
    nodes = [*ast.walk(tree)]
    found, read = [], list[ast.Attribute]()
    for node in nodes:
        if isinstance(node, ast.ImportFrom) and node.module == "os":
            found += ["?" for a in node.names if a.name in ("environ", "getenv")]
        if isinstance(node, ast.Attribute) and node.attr in ("environ", "getenv"):
            read += [node] if ast.unparse(node.value) == "os" else []
    if not read:
        return found
    parents = {child: node for node in nodes for child in ast.iter_child_nodes(node)}
    for node in read:
        use: ast.AST = parents[node]
        if isinstance(use, ast.Attribute):
            use = parents[use]
        key = use.args[0] if isinstance(use, ast.Call) and use.args else getattr(use, "slice", None)
        found.append(key.value if isinstance(key, ast.Constant) else "?")
    return found


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("import pickle", ["pickle"]),
        ("from torch import load", ["torch.load"]),
        ("x = torch.load(f, weights_only=True)", ["torch.load"]),
        ("dist.all_gather_object(values, value)", ["dist.all_gather_object"]),
        ("datasets.load_dataset(n, trust_remote_code=True)", ["trust_remote_code"]),
        ("import json", []),
    ],
)
def test_the_finder_finds(source: str, expected: list[str]) -> None:
    assert _findings(ast.parse(source)) == expected


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("os.environ['RANK']", ["RANK"]),
        ("os.environ.get('HOME', '')", ["HOME"]),
        ("os.getenv('HOME')", ["HOME"]),
        ("dict(os.environ)", ["?"]),
        ("from os import environ", ["?"]),
    ],
)
def test_the_reader_reads(source: str, expected: list[str]) -> None:
    assert _variables(ast.parse(source)) == expected


def test_nothing_that_is_read_can_execute(trees: dict[str, ast.Module]) -> None:
    found = {module: _findings(tree) for module, tree in trees.items()}
    assert not {module: what for module, what in found.items() if what}


def test_no_environment_variable_configures(trees: dict[str, ast.Module]) -> None:
    known = LAUNCHER_VARIABLES | SWITCHES
    found = {module: set(_variables(tree)) - known for module, tree in trees.items()}
    assert not {module: what for module, what in found.items() if what}


def test_an_import_changes_no_environment_variable(root: Path) -> None:
    """Check that no import changes the environment: a hidden GPU stays hidden for later tests."""
    changed = [
        str(file.relative_to(root))
        for file in (*root.glob("headrace/**/*.py"), *root.glob("benchmarks/*.py"))
        for node in tree_of(file).body
        if isinstance(node, ast.Assign | ast.Expr | ast.Delete)
        and any(
            isinstance(n, ast.Attribute) and n.attr in ("environ", "putenv") for n in ast.walk(node)
        )
    ]
    assert changed == []

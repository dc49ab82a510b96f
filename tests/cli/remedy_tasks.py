"""Questions that cannot be asked of a run, and how each remedy is followed."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from shell import Case

FILES = {"FILE.jsonl": "good.jsonl"}
MAKE = Callable[[Path], Any]


def questions(**files: str) -> MAKE:
    """Write files beside one that can be asked: a query and the choices, or a text as it is."""

    def make(_: Path) -> None:
        good = json.dumps({"query": "the river", "choices": ["bends", "is"], "gold": 0})
        Path("good.jsonl").write_text(f"{good}\n")
        for name, text in files.items():
            Path(f"{name}.jsonl").write_text(text.replace("GOOD", good))

    return make


def asks(query: str, *choices: str) -> str:
    """Return a line of a file."""
    return json.dumps({"query": query, "choices": choices, "gold": 0})


def harness(simple_evaluate: Callable[..., Any]) -> Callable[[pytest.MonkeyPatch], Any]:
    """Let lm-evaluation-harness be installed, with one task."""

    def fake(patch: pytest.MonkeyPatch) -> None:
        tasks = ModuleType("lm_eval.tasks")
        tasks.TaskManager = lambda: SimpleNamespace(all_tasks=["one"])  # type: ignore[attr-defined]
        whole = ModuleType("lm_eval")
        whole.simple_evaluate = simple_evaluate  # type: ignore[attr-defined]
        whole.__version__ = "0"  # type: ignore[attr-defined]
        model = ModuleType("lm_eval.api.model")
        model.LM = object  # type: ignore[attr-defined]
        instance = ModuleType("lm_eval.api.instance")
        instance.Instance = object  # type: ignore[attr-defined]
        for module in (whole, tasks, model, instance):
            patch.setitem(sys.modules, module.__name__, module)

    return fake


def no_network(**_: Any) -> None:
    """Fail as a data set does that cannot be fetched."""
    raise OSError("no network")


TASKS = {
    "inference/tasks:task_files#1": Case("eval demo --tasks x.jsonl", questions(), fills=FILES),
    "inference/tasks:task_files#1 folder": Case(
        "eval demo --tasks empty",
        lambda run: (questions()(run), Path("empty").mkdir()),
        fills=FILES,
    ),
    "inference/tasks:read_task#1": Case(
        "eval demo --tasks x.jsonl", questions(x='GOOD\n{"query": 1}\n')
    ),
    "inference/tasks:read_task#2": Case(
        "eval demo --tasks x.jsonl",
        lambda run: (questions()(run), Path("x.jsonl").write_bytes(b"\xff\xfe\xff")),
        fills=FILES,
    ),
    "inference/tasks:read_task#3": Case(
        "eval demo --tasks x.jsonl", questions(x="\n"), fills=FILES
    ),
    "inference/tasks:_asked#1": Case(
        "eval demo --tasks x.jsonl --delimiter ''",
        questions(x=asks("rive", "r", "is")),
        fills={"FILE.jsonl without it": "good.jsonl"},
    ),
    "inference/tasks:_asked#2": Case(
        "eval demo --tasks x.jsonl",
        questions(x=asks("the river", "bends " * 99, "is")),
        fills={"FILE.jsonl of short answers": "good.jsonl"},
    ),
    "cli/eval_tasks:evaluate_tasks#1": Case(
        "eval demo --tasks good.jsonl --tasks ./good.jsonl", questions()
    ),
    "cli/runs:_refuse_beside_tasks#1": Case("eval demo --tasks good.jsonl --stride 4", questions()),
    "cli/runs:evaluate_run#1": Case("eval demo --limit 4"),
    "inference/harness:run_harness#1": Case(
        "eval demo --tasks one",
        questions(),
        prose={"pip install 'headrace[eval]'": "it is not installed here"},
        fills=FILES,
        fake=lambda patch: patch.setitem(sys.modules, "lm_eval", None),
    ),
    "inference/harness:run_harness#2": Case(
        "eval demo --tasks two", questions(), fills=FILES, fake=harness(no_network)
    ),
    "inference/harness:run_harness#3": Case(
        "eval demo --tasks one", questions(), fills=FILES, fake=harness(no_network)
    ),
}
"""Each error by its site."""

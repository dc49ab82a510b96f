"""Compiles once: in a whole run no function of ours is compiled anew at every step.

A number that Python counts, or reads of the step, becomes a guard where it is traced. The next step
fails it and all is compiled again, for minutes, until torch gives up and `fullgraph` ends the run.
One step, as most tests take, does not show it. So a run with each technique, of several
micro-batches a step and two evaluations, compiles each function once with gradients and once
without, and as often as `MORE` says where there are other shapes, objectives or blocks.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import house
import pytest
from house import COMPILE, Plan, Technique, Variant
from torch import Tensor

import headrace
from headrace.assemble.context import check_supported
from headrace.assemble.sockets import Build
from headrace.core.errors import HeadraceError
from headrace.core.progress import Progress
from headrace.plan.technique import Stage
from headrace.train import train

PACKAGE = str(Path(headrace.__file__).parent)
RECORDS = 100_000
"""Compilations that are kept; torch keeps 64 by itself."""
STEPS = 12
LAYERS: Mapping[str, int] = {"model": 2, "block": 10}
"""By scope: one graph holds all, or one serves all, who are more than torch makes graphs of one
function (8)."""
MOST = 2
MORE: Mapping[tuple[str, str], int] = {
    ("sequence_length_schedule", "model"): 3,  # rows of two lengths
    ("sequence_length_schedule", "block"): 3,
    ("shape_buckets", "model"): 3,  # and of two buckets
    ("shape_buckets", "block"): 3,
    ("sophia", "model"): 3,  # the second sweep's objective
    ("sophia", "block"): 3,
    ("lora", "block"): 3,  # what the first block reads needs no gradient
    ("qlora", "block"): 3,
    ("short_convolution", "block"): 4,  # blocks of two kinds
    ("cudnn_autotune", "block"): 4,  # which has those beside it
}
KNOBS: Mapping[str, Mapping[str, Any]] = {"stochastic_depth": {"rate": 0.5}}
"""Over the tiny ones, which leave out no block in twelve steps."""
QUICK = {("stochastic_depth", "block")}
"""Each takes seconds: the others run with the slow tests."""


def run_of(*techniques: Technique[Any], of: str, scope: str, device: str, **keys: Any) -> Plan:
    """A run with two evaluations, of as many blocks as the scope needs."""
    return house.make_plan(
        *techniques,
        device=device,
        model={"layers": LAYERS[scope], **house.model_keys(of, device)},
        eval={"every_steps": STEPS // 2, "tokens": 4 * house.LENGTH},
        **{"goal": {"steps": STEPS}, **keys},
    )


def plan_of(name: str, scope: str, device: str, **keys: Any) -> Plan | None:
    """The technique's run with a compiler that only traces, with one that makes kernels if it must;
    None where it cannot stand beside any."""
    for backend, micro_rows in (("aot_eager", 2), ("aot_eager", 0), ("inductor", 2)):
        knobs = house.beside(name, device)
        knobs[name] = {**house.tiny_knobs(name, device), **KNOBS.get(name, {})}
        knobs[COMPILE] = {**knobs.get(COMPILE, {}), "backend": backend, "scope": scope}
        techniques = [Variant(n, given).technique() for n, given in knobs.items()]
        plan = run_of(
            *techniques, of=name, scope=scope, device=device, micro_rows=micro_rows, **keys
        )
        try:
            check_supported(techniques, house.context_on(device, plan))
        except HeadraceError:
            continue
        return plan
    return None


def compilations(plan: Plan) -> Counter[str]:
    """How often a run compiles each function of the package."""
    from torch._dynamo import utils

    utils.set_compilation_metrics_limit(RECORDS)
    begun = len(utils.get_compilation_metrics())
    try:
        train.run(plan, progress=Progress())
        found = utils.get_compilation_metrics()[begun:]
    finally:
        utils.set_compilation_metrics_limit(utils.DEFAULT_COMPILATION_METRICS_LIMIT)
    files = [(m.co_filename or "", m) for m in found]
    return Counter(
        f"{Path(file).name}:{m.co_firstlineno} {m.co_name}"
        for file, m in files
        if file.startswith(PACKAGE)
    )


def cases() -> list[Any]:
    """Every technique that can stand beside a compiler, on each device and in each scope."""
    return [
        pytest.param(
            device,
            name,
            scope,
            id=f"{device}-{name}-{scope}",
            marks=[pytest.mark.gpu] * (device == "cuda")
            + [pytest.mark.slow] * ((name, scope) not in QUICK),
        )
        for device in ("cpu", "cuda")
        for name in house.names_on(device)
        for scope in LAYERS
        if plan_of(name, scope, device) is not None
    ]


@pytest.mark.parametrize(("device", "name", "scope"), cases())
def test_a_run_compiles_each_function_once(
    device: str, name: str, scope: str, tmp_path: Path
) -> None:
    plan = plan_of(name, scope, device, directory=str(tmp_path))
    assert plan is not None
    found = compilations(house.with_weights(plan, tmp_path))
    assert found, "nothing was compiled"
    assert max(found.values()) <= MORE.get((name, scope), MOST), dict(found)


def counting(build: Build) -> None:
    """Wrap the blocks where a compiler traces it, and count in Python."""
    seen = {"passes": 0}

    def wrap(forward: Callable[..., Tensor], layer: int) -> Callable[..., Tensor]:
        def counted(x_BTD: Tensor, shared: Any) -> Tensor:
            seen["passes"] += 1
            return forward(x_BTD, shared)

        return counted

    build.wrap_blocks("counting", wrap)


def test_a_count_in_compiled_code_is_found(tmp_path: Path) -> None:
    """Four micro-batches compile four times, where nothing but a count changes."""
    toy = house.toy("counting", Stage.CHECKPOINT, counting, composes=("block_forward",))
    compiler = Variant(COMPILE, {"backend": "eager"}).technique()
    plan = run_of(
        toy,
        compiler,
        of=COMPILE,
        scope="model",
        device="cpu",
        micro_rows=3,
        goal={"steps": 2},
        directory=str(tmp_path),
    )
    assert max(compilations(plan).values()) >= 4 > MOST


def test_one_graph_of_blocks_that_are_left_out_is_no_case() -> None:
    assert plan_of("stochastic_depth", "model", "cpu") is None

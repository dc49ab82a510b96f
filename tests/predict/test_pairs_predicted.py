"""No composition is foreseen to hold less than nothing, nor to move or launch it."""

import itertools
from pathlib import Path

import pytest
import torch

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.core.errors import HeadraceError
from headrace.costs.ledger import Ledger
from headrace.plan.changes import parse

TEXT = (Path(__file__).parents[2] / "benchmarks" / "plans" / "1b.toml").read_text()
TRUNK = "-torch_compile -cudnn_attention -fused_swiglu -fused_cross_entropy -bf16_parameters"
ON = {name.removeprefix("-") for name in TRUNK.split()}


def foreseen(pair: tuple[str, ...], *, recipe: bool) -> Ledger | None:
    """1b on an H200 with two techniques over the recipe or the trunk; None where it is refused."""
    try:
        words = [] if recipe else TRUNK.split()
        words += [f"+{name}" for name in pair if not (recipe and name in ON)]
        plan = parse(words).plan(TEXT, catalogue())
        context = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
        return make_ledger(plan, context)
    except HeadraceError:
        return None


def below_nothing(ledger: Ledger) -> list[str]:
    """Names of lines and pieces that are negative."""
    lines = [name for name, line in ledger.memory.items() if line.bytes < -1]
    return lines + [
        n for n, piece in ledger.work.items() if min(piece.count, getattr(piece, "bytes", 0.0)) < 0
    ]


@pytest.mark.parametrize(
    "pair", [("chunked_mlp", "float8_linear"), ("qlora", "quantization_aware_training")]
)
def test_a_cast_is_taken_out_once(pair: tuple[str, str]) -> None:
    ledger = foreseen(pair, recipe=False)
    assert ledger is not None and below_nothing(ledger) == []
    assert any(name.endswith("/weight_cast") for name in ledger.memory)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", [False, True], ids=["trunk", "recipe"])
def test_every_pair(recipe: bool) -> None:
    counted, wrong = 0, {}
    one = [n for n, t in catalogue().techniques.items() if t.room != "parallel"]  # a GPU's
    for pair in itertools.combinations(one, 2):
        ledger = foreseen(pair, recipe=recipe)
        if ledger is not None:
            counted += 1
            if found := below_nothing(ledger):
                wrong[pair] = found[:3]
    assert counted > 300 and not wrong, wrong

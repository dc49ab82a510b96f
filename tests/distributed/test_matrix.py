"""Every pair of techniques: equal, or a refusal with its reason; `explain --matrix` prints it.

A pair with a technique that splits the model runs on 4 ranks, any other in this process. The file
that the command prints is what these tests found: run them with `--matrix FILE` to write what was
run over what is there.
"""

import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import house
import pytest
import torch
from composition import Composition, run
from pairs import AXES_OF, pair_composition
from test_compositions import assert_inside_the_band, beyond

from headrace.assemble.context import check_supported, make_context
from headrace.catalogue.matrix import explain_matrix, read_matrix
from headrace.core.errors import HeadraceError
from headrace.parallel.world import World
from headrace.plan.technique import Supported, check_claims

NAMES = sorted(house.CATALOGUE.techniques)
PAIRS = list(itertools.combinations(NAMES, 2))
FOUND: dict[str, dict[str, str]] = {}
WHILE_BUILT = ("both replace the linear", "computes attention and does not know")
"""Words of refusals of what two techniques do to one part of the model."""


@pytest.fixture(scope="module", autouse=True)
def written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write what was found, if asked."""
    yield
    into: Path | None = request.config.getoption("--matrix")
    if into is not None:
        pairs = {**(read_matrix()["pairs"] if into.exists() else {}), **FOUND}
        assert pairs.keys() == {" ".join(pair) for pair in PAIRS}, "run the pairs that are missing"
        value = {"torch": torch.__version__.split("+")[0], "pairs": dict(sorted(pairs.items()))}
        into.write_text(json.dumps(value, indent=1) + "\n")


def refusal(composition: Composition) -> str | None:
    """Why the pair cannot be built here: the message a user sees, or "gpu"; None if it can."""
    try:
        plan = composition.plan()
        techniques = list(plan.techniques.values())
        here, gpu = (
            all(
                isinstance(t.supports(house.context_on(device, plan)), Supported)
                for t in techniques
            )
            for device in ("cpu", "cuda")
        )
        check_claims(techniques)
        if gpu and not here:
            return "gpu"
        check_supported(techniques, make_context(plan, torch.device("cpu")))
    except HeadraceError as error:
        return str(error)
    return None


def cases() -> list[Any]:
    """Return every pair."""
    return [
        pytest.param(pair_composition(*pair), id="+".join(pair), marks=pytest.mark.slow)
        for pair in PAIRS
    ]


@pytest.mark.parametrize("composition", cases())
def test_the_pair_is_equal_or_refuses(
    composition: Composition, told: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """Compare what becomes of a pair with the file, if that is not written anew."""
    pair = composition.name.removeprefix("pair ")
    FOUND[pair] = found(composition, told)
    if request.config.getoption("--matrix") is None:
        assert read_matrix()["pairs"][pair] == FOUND[pair]


def found(composition: Composition, told: Callable[..., Any]) -> dict[str, str]:
    """Return what becomes of a pair: outcome, and why."""
    refused = refusal(composition)
    if refused is None and AXES_OF.keys() & composition.techniques.keys():
        said = told(composition)
        assert not said.errors, said.errors[0]
        refused = said.refusals[0] if said.refusals else None
        outcome = said.outcome() if refused is None else None
    elif refused is None:
        try:
            outcome = run(composition, World())[1]
        except HeadraceError as error:
            refused = str(error)
    if refused is not None:
        return {"outcome": "gpu" if refused == "gpu" else "refuses", "why": refused}
    if composition.approximate:
        assert_inside_the_band(outcome, composition)
        return {"outcome": "equal", "why": "inside the band of its gradients"}
    wrong = beyond(outcome, composition)
    assert not wrong, f"beyond rounding: {wrong}"
    return {"outcome": "equal", "why": "loss, gradients, weights"}


def test_the_matrix_names_every_pair_and_tells_todays_refusals() -> None:
    matrix = read_matrix()
    assert set(matrix["pairs"]) == {" ".join(pair) for pair in PAIRS}
    for pair in PAIRS:
        known = matrix["pairs"][" ".join(pair)]
        now = refusal(pair_composition(*pair))
        if now is not None:
            assert known["outcome"] == ("gpu" if now == "gpu" else "refuses"), (pair, now)
            assert known["why"] == now
        elif known["outcome"] != "equal":  # it is refused as it is built, which only a run shows
            assert any(words in known["why"] for words in WHILE_BUILT), (pair, known["why"])
    assert explain_matrix(matrix).count("\n") >= len(NAMES)

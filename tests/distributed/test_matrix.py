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
from pairs import AXES_OF, UNRUN, pair_composition, refusal, stands
from test_compositions import assert_inside_the_band, beyond

from headrace.catalogue.matrix import explain_matrix, needs_of, read_matrix
from headrace.core.errors import HeadraceError
from headrace.parallel.world import World

NAMES = sorted(house.CATALOGUE.techniques)
PAIRS = list(itertools.combinations(NAMES, 2))
FOUND: dict[str, dict[str, Any]] = {}
WHILE_BUILT = ("both replace the linear", "computes attention and does not know")
"""Words of refusals of what two techniques do to one part of the model."""


@pytest.fixture(scope="module", autouse=True)
def written(request: pytest.FixtureRequest) -> Iterator[None]:
    """Write what was found, if asked."""
    yield
    into: Path | None = request.config.getoption("--matrix")
    if into is not None:
        before = read_matrix()["pairs"] if into.exists() else {}
        pairs = {" ".join(pair): renewed(pair, before) for pair in PAIRS}
        missing = sorted(pair for pair, entry in pairs.items() if entry is None)
        kept = {pair: entry or before.get(pair) for pair, entry in pairs.items()}
        value = {"torch": torch.__version__.split("+")[0], "pairs": kept}
        into.write_text(json.dumps(value, indent=1) + "\n")
        assert not missing, f"run the pairs that are missing: {missing}"


def renewed(pair: tuple[str, str], before: dict[str, Any]) -> dict[str, Any] | None:
    """Return a pair's entry as it is found now; None where only a run can tell."""
    key = " ".join(pair)
    if key in FOUND:
        return FOUND[key]
    entry, composition = stands(*pair)
    if composition is None:
        return entry
    known = before.get(key, {"outcome": "refuses", "why": ""})
    if known["outcome"] == "refuses":
        return known if any(words in known["why"] for words in WHILE_BUILT) else None
    return {**entry, "why": known["why"]} if known["outcome"] in ("equal", "needs") else None


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
    FOUND[pair] = found(pair, told)
    if request.config.getoption("--matrix") is None:
        assert read_matrix()["pairs"][pair] == FOUND[pair]


def found(pair: str, told: Callable[..., Any]) -> dict[str, Any]:
    """Return what becomes of a pair: outcome, what it needs beside it, and why."""
    one, two = pair.split()
    entry, composition = stands(one, two)
    if composition is None:
        return entry
    refused = None
    if AXES_OF.keys() & composition.techniques.keys():
        said = told(composition)
        assert not said.errors, said.errors[0]
        refused = said.refusals[0] if said.refusals else None
        outcome = said.outcome() if refused is None else None
    else:
        try:
            outcome = run(composition, World())[1]
        except HeadraceError as error:
            refused = str(error)
    if refused is not None:
        return {"outcome": "refuses", "why": refused}
    if composition.approximate:
        assert_inside_the_band(outcome, composition)
        return {**entry, "why": "inside the band of its gradients"}
    wrong = beyond(outcome, composition)
    assert not wrong, f"beyond rounding: {wrong}"
    return {**entry, "why": "loss, gradients, weights"}


def test_the_matrix_names_every_pair_and_tells_todays_refusals() -> None:
    matrix = read_matrix()
    assert set(matrix["pairs"]) == {" ".join(pair) for pair in PAIRS}
    for pair in PAIRS:
        known = matrix["pairs"][" ".join(pair)]
        now, composition = stands(*pair)
        if composition is None:
            assert known == now, pair
        elif known["outcome"] == "refuses":  # as it is built, which only a run shows
            assert any(words in known["why"] for words in WHILE_BUILT), (pair, known["why"])
        else:
            assert {**now, "why": known["why"]} == known, pair
    assert explain_matrix(matrix).count("\n") >= len(NAMES)


def test_nothing_refuses_for_a_missing_gpu_or_companion() -> None:
    """What such a refusal offers first is a technique more, another device or a package."""
    pairs = read_matrix()["pairs"]
    refusing = [pair for pair in PAIRS if pairs[" ".join(pair)]["outcome"] == "refuses"]
    assert refusing
    for pair in refusing:
        error = refusal(pair_composition(*pair, device="cuda"), "cuda")
        first = error.remedy.changes[0] if error is not None and error.remedy.changes else ()
        assert first != ("device=cuda",), pair
        assert not first or not all(word.startswith("+") for word in first), pair


@pytest.mark.parametrize(
    ("pair", "outcome", "needs"),
    [
        (("fsdp", "fused_cross_entropy"), "gpu", None),
        (("cudnn_attention", "fsdp"), "gpu", None),
        (("activation_offload", "pipeline_parallel"), "gpu", None),
        (("flash_attention_3", "zero"), "gpu", None),
        (("fsdp", "liger_kernels"), "gpu", None),
        (("fsdp", "tf32"), "gpu", ["model.precision=fp32"]),
        (("fsdp", "window_schedule"), "needs", ["sliding_window"]),
        (("cuda_graphs", "lora"), "gpu", ["torch_compile"]),
        (("compile_cache", "lora"), "needs", ["torch_compile"]),
        (("preference", "zero"), "needs", ["data.chat.kind=preference"]),
        (("dynamic_batch", "fsdp"), "refuses", None),
        (("cpu_threads", "fused_rope"), "refuses", None),
    ],
)
def test_a_pair_says_what_it_lacks(
    pair: tuple[str, str], outcome: str, needs: list[str] | None
) -> None:
    entry = read_matrix()["pairs"][" ".join(pair)]
    assert (entry["outcome"], entry.get("needs")) == (outcome, needs)


def test_what_a_technique_needs_is_said_once() -> None:
    pairs = read_matrix()["pairs"]
    asked = needs_of(pairs)
    assert asked["shape_buckets"] == "sequence_length_schedule, torch_compile"
    assert asked["optimizer_in_backward + ulysses"] == "fsdp" and len(asked) < 20
    for pair, entry in pairs.items():
        keys = (*pair.split(), pair.replace(" ", " + "))
        for name in entry.get("needs", ()):
            assert any(name in asked.get(key, "") for key in keys), pair


def test_only_what_brings_something_is_not_run() -> None:
    entries = read_matrix()["pairs"].items()
    unrun = [pair for pair, entry in entries if entry["why"].startswith("accepted; not run")]
    assert unrun and all(UNRUN.keys() & set(pair.split()) for pair in unrun)

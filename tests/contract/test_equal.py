"""Compare loss and every gradient of a technique with the plain baseline's, beside anything.

The reference is the baseline on single rows, or on single documents where documents are masked: no
batch, no accumulation, no technique. An `exact` technique has its gradients and, after updates, its
weights. A `learning` or `approximate` one is compared with itself under plain conditions; where it
only touches what follows the gradient, or says which tokens see each other, its gradients have the
reference too. On a GPU the run is in bf16 and the reference in fp32, within BAND_BF16; a technique
beside itself is on the host there, since not every one has fp32 on a GPU. Where rounding to bf16
alone moves the reference's gradients by more (a norm of what is nearly zero, a factor of 2048), the
run is in fp32 too if it can be.

What `house.BESIDE` puts beside a technique changes no reference while it is exact itself: the plain
baseline is more than the companion, which might be wrong in the same way. A companion that learns
otherwise has no baseline's gradients. An `exact` technique beside it changes none of its gradients,
so the reference is the companion under plain conditions.
"""

from collections.abc import Mapping, Sequence
from functools import cache, lru_cache
from types import MappingProxyType
from typing import Any

import house
import pytest
import sets
from crosses import pairwise_cover, whole_cross
from house import COMPILE, PACKING, SHAPES, Result, Technique, Variant
from torch import Tensor

from headrace.core.errors import ConfigError
from headrace.plan.technique import check_claims

AFTER_THE_GRADIENT = {"routes", "after_update", "values", "state", "weights_for_eval", "mask"}
"""Sockets that leave the baseline's gradients alone, and the mask, which the reference knows."""
MOVED = 1.01
"""Times the weights of a case that is tried again: no number stays on the border where it was."""

AXES: dict[str, tuple[Any, ...]] = {
    "packing": (False, True),
    "micro_rows": (0, 2, 1),
    "ignored": (False, True),
    "compile": (None, "model", "block"),
    "shape": tuple(SHAPES),
}
COMPILED = {
    "block": {"packing": True, "micro_rows": 2, "ignored": True, "compile": "block"},
    "model": {"packing": False, "micro_rows": 0, "ignored": True, "compile": "model"},
}
"""Compiling takes seconds: each technique has one of these cases, or none where nothing of it is in
a graph. They are slow tests, but for what rounds otherwise; quick ones compile sets of techniques,
and the uncompiled cases say the rest."""
GRAPHS_ELSEWHERE = {
    "kept_memory": "it moves memory, and its graph is the baseline's",
    "length_mixing": "it cuts rows before the graph, whose packing is in the sets of blocks",
    "lora": "qlora's graph and dora's hold its adapters",
}
"""Techniques alone in a set that the quick list compiles in another: each is slow, with why."""
OF_ALL_BLOCKS = {"place", "annotate", "enrich", "recut", "source", "config.tied_embeddings"}
"""Sockets of what stands before the blocks or goes through all: compiling the whole model shows it,
and takes twice as long as one block and the loss do."""
OF_NO_GRAPH = AFTER_THE_GRADIENT - {"mask"} | {"transport", "loss_scale", "recover", "clip"}
"""Sockets of what runs before or after the graph."""


def can_stand_together(*techniques: Technique[Any]) -> bool:
    """Whether no socket has two owners and nobody is excluded."""
    try:
        check_claims(techniques)
    except ConfigError:
        return False
    return True


def techniques_of(variant: Variant, case: dict[str, Any], device: str) -> dict[str, Any]:
    """Return the technique and what the case crosses it with, by name."""
    knobs = house.beside(variant.name, device)
    if case["packing"]:
        knobs[PACKING] = {}
    if case["compile"]:
        given = knobs.get(COMPILE, house.tiny_knobs(COMPILE, device))
        knobs[COMPILE] = {**given, "scope": case["compile"]}
    knobs[variant.name] = {**knobs.get(variant.name, {}), **variant.knobs}
    return {name: Variant(name, given).technique() for name, given in knobs.items()}


def allowed(case: dict[str, Any], device: str) -> bool:
    """Whether the case can be built, and its technique is more than the crossing."""
    asked = {key: value for key, value in case.items() if key != "ignored"}
    return can_be_built(device, **asked)


@cache
def can_be_built(device: str, **case: Any) -> bool:
    """Whether a plan of these choices is one; which targets are ignored is no part of a plan."""
    techniques = techniques_of(case["variant"], case, device).values()
    try:
        plan = house.make_plan(
            *techniques,
            shape=case["shape"],
            device=device,
            micro_rows=case["micro_rows"],
            model=house.model_keys(case["variant"].name, device),
        )
    except ConfigError:
        return False
    context = house.context_on(device, plan)
    answers = [technique.supports(context) for technique in techniques]
    return can_stand_together(*techniques) and all(isinstance(a, house.Supported) for a in answers)


def scopes(technique: type[Technique[Any]]) -> list[str]:
    """Return which scopes to compile it in, the likely one first."""
    touched = {*technique.claims, *technique.composes}
    if touched <= OF_NO_GRAPH:
        return []
    return ["model", "block"] if touched & OF_ALL_BLOCKS else ["block", "model"]


def compiled_case(variant: Variant, device: str) -> list[dict[str, Any]]:
    """Return the case in which it is compiled: the likely scope in the first shape that can be."""
    choices = [
        {"variant": variant, **COMPILED[scope], "shape": shape}
        for scope in scopes(type(variant.technique()))
        for shape in SHAPES
    ]
    return [case for case in choices if allowed(case, device)][:1]


def compiled_sets() -> list[Any]:
    """Return sets of techniques that are compiled together, by scope and shape."""
    alike: dict[tuple[str, str], list[Variant]] = {}
    for variant in sets.leading():
        if house.compiles(variant, "cpu") or variant.technique().equality == "approximate":
            continue
        for case in compiled_case(variant, "cpu"):
            alike.setdefault((case["compile"], case["shape"]), []).append(variant)
    return [
        pytest.param(
            scope,
            shape,
            found,
            id=f"{scope}-{shape}-{sets.name_of(found)}",
            marks=[pytest.mark.slow] * (sets.name_of(found) in GRAPHS_ELSEWHERE),
        )
        for (scope, shape), variants in alike.items()
        for found in sets.sets_of(variants, apart=sets.LONG_GRAPHS, **keys_of_a_set(scope, shape))
    ]


def keys_of_a_set(scope: str, shape: str) -> dict[str, Any]:
    """Return the keys of a set's plan."""
    return {"shape": shape, "micro_rows": COMPILED[scope]["micro_rows"]}


def is_slow(case: dict[str, Any], device: str) -> bool:
    """Whether a case of the cover takes long: what compiles by itself is tried with several
    micro-batches, and elsewhere among the slow tests."""
    variant = case["variant"]
    in_a_set = case["compile"] is not None and variant.technique().equality != "approximate"
    by_itself = case["compile"] is None and house.compiles(variant, device)
    return variant.dear or in_a_set or (by_itself and case["micro_rows"] != 2)


def cases(device: str, *, slow: bool) -> list[Any]:
    """A pairwise cover uncompiled, each technique compiled, each knob; the rest is slow."""
    plain = [house.variants(name, device)[0] for name in house.names_on(device)]
    axes = {"variant": plain, **AXES}
    cover = pairwise_cover({**axes, "compile": (None,)}, lambda case: allowed(case, device))
    for variant in plain:
        cover += compiled_case(variant, device)
    knobs = [
        {
            "variant": v,
            "packing": False,
            "micro_rows": 2,
            "ignored": True,
            "compile": None,
            "shape": "tied",
        }
        for name in house.names_on(device)
        for v in house.variants(name, device)[1:]
    ]
    cover += [c for c in knobs if allowed(c, device)]
    cheap = {**axes, "variant": [v for v in plain if not v.dear]}
    rest = [c for c in whole_cross(cheap) if allowed(c, device) and c not in cover] if slow else []
    return [
        pytest.param(
            {**case, "device": device},
            id="-".join([device, *map(str, case.values())]),
            marks=[pytest.mark.gpu] * (device == "cuda")
            + [pytest.mark.slow] * (is_slow(case, device) or number >= len(cover)),
        )
        for number, case in enumerate([*cover, *rest])
    ]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Thousands of cases that would only be left out are not made."""
    if "case" in metafunc.fixturenames:
        marks = metafunc.config.getoption("markexpr")
        devices = ("cpu",) if "not gpu" in marks else ("cpu", "cuda")
        slow = "not slow" not in marks
        metafunc.parametrize("case", [c for d in devices for c in cases(d, slow=slow)])


@lru_cache(maxsize=64)
def baseline(
    shape: str, ignored: bool, documents: bool, device: str, model: tuple[tuple[str, Any], ...]
) -> Result:
    """Return the reference over a model's keys; techniques that ask for the same ones share it."""
    rows = house.make_rows(SHAPES[shape]["vocab"], ignored=ignored)
    return house.baseline_reference(
        shape, rows, documents=documents, device=device, model=dict(model)
    )


def run_case(
    case: dict[str, Any],
    *,
    alone: bool = False,
    nudged: float = 0.0,
    fp32: bool = False,
    of: Mapping[str, Tensor] = MappingProxyType({}),
) -> tuple[Any, Result, dict[str, Tensor]]:
    """Take a step; `alone` uncompiled on one whole micro-batch, in fp32 on the host, and without
    what is exact. From the weights `of` another run, which may hold some in bf16 that a host does
    not. The third is what it began with."""
    variant, device = case["variant"], case["device"]
    given = {**case, "micro_rows": 0, "compile": None} if alone else case
    techniques = techniques_of(variant, given, device)
    if alone and techniques[variant.name].equality == "exact":
        del techniques[variant.name]
    asked = {"precision": "auto" if alone else "fp32"} if alone or fp32 else {}
    plan = house.make_plan(
        *techniques.values(),
        shape=case["shape"],
        micro_rows=given["micro_rows"],
        device="cpu" if alone else device,
        model={**house.model_keys(variant.name, device), **asked},
    )
    build = house.random_build(plan, of=of, nudged=nudged)
    start = {name: p.detach().cpu().clone() for name, p in build.model.named_parameters()}
    rows = house.make_rows(SHAPES[case["shape"]]["vocab"], ignored=case["ignored"])
    return build, house.take_step(build, rows), start


def runs_in_fp32(case: dict[str, Any]) -> bool:
    """Whether the technique has fp32 where the case runs."""
    return house.fits(case["variant"], device=case["device"], model={"precision": "fp32"})


def assert_same_weights(
    build: Any, found: Result, case: dict[str, Any], band: float | None
) -> None:
    """Compare weights after a step where gradients are freed in the backward pass."""
    packing = [Variant(PACKING).technique()] if case["packing"] else []
    plan = house.make_plan(*packing, shape=case["shape"], device=case["device"])
    plain = house.random_build(plan)
    rows = house.make_rows(SHAPES[case["shape"]]["vocab"], ignored=case["ignored"])
    loss = house.take_step(plain, rows).loss
    ours, theirs = (
        {n: p.detach().float().cpu() for n, p in b.model.named_parameters()} for b in (build, plain)
    )
    house.assert_equal(Result(found.loss, ours), Result(loss, theirs), band=band)


def test_gradients_equal_the_reference(case: dict[str, Any]) -> None:
    build, found, start = run_case(case)
    technique = build.plan.techniques[case["variant"].name]
    band = house.BANDS.get(build.context.precision)
    if not any(p.grad is not None for p in build.model.parameters()):
        assert technique.equality == "exact"
        assert_same_weights(build, found, case, band)
        return
    model = tuple(sorted(house.model_keys(case["variant"].name, case["device"]).items()))
    right = baseline(case["shape"], case["ignored"], build.mask.document, case["device"], model)
    touched = {*technique.claims, *technique.composes}
    others = case["variant"].companions(case["device"])
    learns = "learning" in {t.equality for t in (technique, *others)}
    if all(t.equality == "exact" for t in (technique, *others)) or (
        touched <= AFTER_THE_GRADIENT and build.mask.sees_all_before
    ):
        house.assert_equal(found, right, band=band)
        return
    if technique.equality == "approximate":
        house.assert_equal(found, right, band=technique.band + (band or 0.0))
        if house.refusal(case["variant"], "cpu"):  # a GPU's own rounding, which no host repeats
            return
    wanted = run_case(case, alone=True, of=start)[1]

    def nudged(unit: float) -> Result:
        return run_case(case, alone=True, of=start, nudged=unit)[1]

    could = band is not None and learns and runs_in_fp32(case)
    if could and house.rounding(wanted, nudged, half=True) > house.BAND_BF16:
        found, band = run_case(case, fp32=True)[1], None
    off = house.distances(found, wanted, by_norm=band is not None)
    if technique.equality == "approximate" and max(off.values()) > (band or house.TOLERANCE_FP32):
        # A number on the border of two roundings falls on either: other weights have other borders.
        start = {name: weight * MOVED for name, weight in start.items()}
        found, wanted = (run_case(case, alone=a, of=start)[1] for a in (False, True))
    house.assert_equal(found, wanted, band=band, nudged=nudged)


@pytest.mark.parametrize(("scope", "shape", "variants"), compiled_sets())
def test_many_compiled_equal_themselves_uncompiled(
    scope: str, shape: str, variants: Sequence[Variant]
) -> None:
    """Compare loss and every gradient, or the weights where gradients are freed in the backward."""
    keys = keys_of_a_set(scope, shape)
    packed = sets.plan_of([Variant(PACKING), *variants], **keys)
    plain = (packed if COMPILED[scope]["packing"] else None) or sets.plan_of(variants, **keys)
    assert plain is not None
    others = dict(plain.techniques)
    compiler = Variant(COMPILE, {**house.tiny_knobs(COMPILE, "cpu"), "scope": scope}).technique()
    rows = house.make_rows(SHAPES[shape]["vocab"], ignored=True)

    def step_of(techniques: dict[str, Any], nudged: float = 0.0) -> Result:
        build = house.random_build(plain.replaced(techniques=techniques), nudged=nudged)
        found = house.take_step(build, rows)
        if any(p.grad is not None for p in build.model.parameters()):
            return found
        return Result(found.loss, {n: p.detach() for n, p in build.model.named_parameters()})

    found, wanted = step_of({**others, COMPILE: compiler}), step_of(others)
    house.assert_equal(found, wanted, nudged=lambda unit: step_of(others, unit))


def exact_variants() -> list[Any]:
    """What is `exact` and not dear, on each device."""
    return [
        pytest.param(
            v,
            device,
            id=f"{device}-{v}",
            marks=[pytest.mark.gpu] * (device == "cuda")
            + [pytest.mark.slow] * house.is_a_knob_of_a_graph(v, device),
        )
        for device in ("cpu", "cuda")
        for name in house.names_on(device)
        for v in house.variants(name, device)
        if v.technique().equality == "exact" and not v.dear
    ]


@pytest.mark.parametrize(("variant", "device"), exact_variants())
def test_weights_follow_the_baselines(variant: Variant, device: str) -> None:
    """Compare weights after three clipped steps of two micro-batches or more.

    An `exact` technique ends at the baseline's weights, or at those of what stands beside it and
    learns otherwise. Both sides run in half precision where a GPU's technique has no other, and
    agree within its band.
    """
    rows = [house.make_rows(SHAPES["grouped"]["vocab"], ignored=True, seed=n) for n in range(3)]
    keys: dict[str, Any] = {"micro_rows": 2, "optimizer": {"clip_norm": 0.3}}
    keys = keys if house.fits(variant, device=device, **keys) else {}
    needed = house.model_keys(variant.name, device)
    fp32 = house.fits(variant, device=device, **keys, model={"precision": "fp32"})
    keys["model"] = {**needed, **({"precision": "fp32"} if fp32 else {})}
    learning = [t for t in variant.companions(device) if t.equality != "exact"]
    ends, builds = [], []
    for plan in (
        house.make_plan(*learning, device=device, **keys),
        house.plan_of(variant, device=device, **keys),
    ):
        build = house.random_build(plan)
        losses = [house.take_step(build, batch, index=n).loss for n, batch in enumerate(rows)]
        weights = {n: p.detach().float().cpu() for n, p in build.model.named_parameters()}
        ends.append(Result(losses[-1], weights))
        builds.append(build)
    band = house.BANDS.get(builds[1].context.precision)
    house.assert_equal(ends[1], ends[0], band=band)

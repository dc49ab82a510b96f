"""Rotations are scaled: each rule against a plain formula and transformers, refusals, export."""

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.inference.sample import generate
from headrace.model.decoder import baseline_parts
from headrace.model.hf_config import config_from_hf, config_to_hf
from headrace.model.position import RotaryPosition
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.attention.yarn import ScaledRope, Yarn

KINDS = ("yarn", "ntk", "linear", "llama3")
SIZES = {
    "small": ({"dim": 64, "heads": 2}, {"factor": 4.0, "original_length": 256}),
    "llama3.1": (
        {"dim": 512, "heads": 4, "rope_theta": 500_000.0},
        {"factor": 8.0, "original_length": 8192},
    ),
    "odd": (
        {"dim": 88, "heads": 4, "rope_theta": 77_000.0},
        {
            "factor": 2.7,
            "original_length": 1000,
            "beta_fast": 20.0,
            "beta_slow": 1.5,
            "low_frequency_factor": 1.5,
            "high_frequency_factor": 5.0,
        },
    ),
}
TINY = ("techniques.yarn.factor=2.0", "techniques.yarn.original_length=8")


def rope_of(kind: str, size: str) -> ScaledRope:
    model, knobs = SIZES[size]
    rule = Yarn.model_validate({"kind": kind, **knobs})
    config = ModelConfig.model_validate({"vocab": 64, **model})
    return ScaledRope(config, rule.rule(rule.original_length))


def by_hand(rope: ScaledRope) -> list[float]:
    """Return each pair's frequency in double precision, from its wavelength."""
    rule, K, L = rope.rule, rope.head_dim, rope.original
    found = []
    for pair in range(K // 2):
        wavelength = 2 * math.pi * rope.theta ** (2 * pair / K)
        if rule.kind == "linear":
            wavelength *= rule.factor
        elif rule.kind == "ntk":
            base = rope.theta * rule.factor ** (K / (K - 2))
            wavelength = 2 * math.pi * base ** (2 * pair / K)
        elif rule.kind == "llama3":
            turns = L / wavelength
            low, high = rule.low_frequency_factor, rule.high_frequency_factor
            if turns < low:
                wavelength *= rule.factor
            elif turns <= high:
                smooth = (turns - low) / (high - low)
                wavelength /= (1 - smooth) / rule.factor + smooth
        else:
            # Pairs where a whole rotation fits beta times; the first and last whole ones.
            place = [
                K / 2 * math.log(L / (beta * 2 * math.pi), rope.theta)
                for beta in (rule.beta_fast, rule.beta_slow)
            ]
            first, last = math.floor(place[0]), math.ceil(place[1])
            slow = min(1.0, max(0.0, (pair - first) / (last - first)))
            wavelength /= slow / rule.factor + (1 - slow)
        found.append(2 * math.pi / wavelength)
    return found


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_pair_turns_as_the_rule_says(kind: str, size: str) -> None:
    rope = rope_of(kind, size)
    right = by_hand(rope)
    plain = RotaryPosition.frequencies(rope, torch.device("cpu"))
    found = rope.frequencies(torch.device("cpu"))
    torch.testing.assert_close(found, torch.tensor(right), rtol=2e-6, atol=0)
    slower = (plain / found).tolist()
    assert slower[-1] == pytest.approx(rope.rule.factor, rel=1e-5)
    assert slower[0] == pytest.approx(rope.rule.factor if kind == "linear" else 1.0, rel=1e-5)
    rotation = rope.prepare(torch.tensor([[0, 5]]))
    size_ = 0.1 * math.log(rope.rule.factor) + 1 if kind == "yarn" else 1.0
    for place in (0, 5):
        cos, sin = (x[0, int(place > 0), 0] for x in rotation)
        angles = torch.tensor([place * w for w in right])
        torch.testing.assert_close(cos, size_ * angles.cos(), rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(sin, size_ * angles.sin(), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", KINDS)
def test_transformers_makes_the_same_frequencies_of_what_we_write(kind: str, size: str) -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    rope = rope_of(kind, size)
    model, _ = SIZES[size]
    fields = {"rope_theta": rope.theta, "max_position_embeddings": 4096, **rope.config_fields()}
    config = transformers.LlamaConfig(
        hidden_size=model["dim"], num_attention_heads=model["heads"], **fields
    )
    told = config.rope_parameters
    if kind == "ntk":
        assert told["rope_type"] == "default"
        theirs: Tensor = told["rope_theta"] ** -(torch.arange(0, rope.head_dim, 2) / rope.head_dim)
        temperature = 1.0
    else:
        theirs, temperature = ROPE_INIT_FUNCTIONS[kind](config, torch.device("cpu"))
    torch.testing.assert_close(rope.frequencies(torch.device("cpu")), theirs, rtol=1e-6, atol=0)
    assert rope.temperature == pytest.approx(temperature)


def test_a_dynamic_base_follows_the_length_of_each_document() -> None:
    """Beyond the original rows the base grows by the formula; neighbours change nothing."""
    rule = Yarn(kind="dynamic", factor=3.0, original_length=8).rule(8)
    rope = ScaledRope(ModelConfig(vocab=64, dim=48, heads=2), rule)
    K = rope.head_dim

    def right(length: int) -> Tensor:
        """Return the angles of a document of so many tokens, in double precision."""
        beyond = max(1.0, 3 * length / 8 - 2)
        theta = rope.theta * beyond ** (K / (K - 2))
        pair = torch.arange(0, K, 2, dtype=torch.float64)
        return torch.arange(length)[:, None] * theta ** (-pair / K)

    lengths = [[5, 20, 8], [33]]
    positions = torch.tensor([[p for n in row for p in range(n)] for row in lengths])
    cos, sin = rope.prepare(positions)
    for row, documents in enumerate(lengths):
        angles = torch.cat([right(n) for n in documents])
        torch.testing.assert_close(cos[row, :, 0], angles.cos().float(), rtol=0, atol=1e-5)
        torch.testing.assert_close(sin[row, :, 0], angles.sin().float(), rtol=0, atol=1e-5)
    plain = RotaryPosition.prepare(rope, positions[:1, :5])
    torch.testing.assert_close(cos[:1, :5], plain.cos, rtol=0, atol=1e-6)
    last = rope.prepare(torch.tensor([[32]]))  # a token behind a cache
    torch.testing.assert_close(last.cos[0, 0], cos[1, 32], rtol=0, atol=1e-5)


def test_a_ramp_ends_where_the_rule_says_though_no_pair_is_there() -> None:
    """Rows that are long beside theta: the slowest pair is not slowed by the whole factor."""
    rule = Yarn(factor=4.0, original_length=1000).rule(1000)
    rope = ScaledRope(ModelConfig(vocab=64, dim=32, heads=2, rope_theta=100.0), rule)
    found = rope.frequencies(torch.device("cpu"))
    torch.testing.assert_close(found, torch.tensor(by_hand(rope)), rtol=2e-6, atol=0)
    assert 2 < float(RotaryPosition.frequencies(rope, found.device)[-1] / found[-1]) < 3


@pytest.mark.parametrize("kind", ["yarn", "linear", "llama3"])
def test_a_scaled_checkpoint_is_read_as_it_was_written(kind: str) -> None:
    """A model that is scaled already is not scaled again."""
    rope = rope_of(kind, "odd")
    config = ModelConfig(vocab=64, **SIZES["odd"][0])  # type: ignore[arg-type]
    values = config_to_hf(config, sequence_length=48, position=rope.config_fields())
    again = config_from_hf(values)
    position = baseline_parts(again).position(again)
    assert isinstance(position, ScaledRope)
    device = torch.device("cpu")
    assert position.frequencies(device).equal(rope.frequencies(device))
    assert position.config_fields() == rope.config_fields()
    values["rope_scaling"]["attention_factor"] = 3.0
    with pytest.raises(UnsupportedError, match=r"rope_scaling\.attention_factor = 3"):
        config_from_hf(values)


def test_a_rotation_that_is_slowed_already_is_not_slowed_again(
    make_tiny: Callable[..., Build],
) -> None:
    scaled = ("model.rope_scaling.kind=linear", "model.rope_scaling.factor=8")
    with pytest.raises(UnsupportedError, match="'linear', factor 8") as told:
        make_tiny(*scaled, *TINY)
    assert ("-yarn",) in told.value.remedy.changes
    make_tiny(*scaled)


def test_evidence_is_the_built_models(make_tiny: Callable[..., Build]) -> None:
    found = Yarn().active(make_tiny(*TINY))
    assert found.active and found.numbers["slowest"] == pytest.approx(2.0)
    assert found.numbers["temperature"] == pytest.approx(0.1 * math.log(2) + 1)
    assert 0 < found.numbers["slowed"] < found.numbers["pairs"]
    plain = Yarn().active(make_tiny())
    assert not plain.active and plain.numbers["slowed"] == 0
    assert not Yarn().active(make_tiny("model.position=none")).active
    faster: Any = make_tiny(*TINY)
    faster.model.position.frequencies = lambda device: torch.full((4,), 1.5)
    assert not Yarn().active(faster).active


def test_the_original_row_is_a_part_of_the_runs(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny("techniques.yarn.factor=2.0")
    assert build.model.position.original == build.plan.data.sequence_length // 2


REFUSED = [
    ({}, {"model.position": "none"}, "has no rotation", "model.position=rope"),
    ({"kind": "linear"}, {"model.position": "learned"}, "has no rotation", "model.position=rope"),
    ({"original_length": 6}, {}, "takes 7", "techniques.yarn.original_length=7"),
    ({"beta_fast": 1.0}, {}, "beta_fast = 1 must be more than", "techniques.yarn.beta_fast=2"),
    (
        {"kind": "llama3", "low_frequency_factor": 5.0},
        {},
        "high_frequency_factor = 4 must be",
        "techniques.yarn.high_frequency_factor=10",
    ),
    ({"original_length": 1 << 24}, {}, "no pair is slowed", "techniques.yarn.original_length="),
    ({"kind": "ntk"}, {"model.head_dim": "2"}, "one pair", "model.head_dim=4"),
    (
        {"kind": "dynamic", "original_length": 1000},
        {},
        "rows of",
        "techniques.yarn.original_length=",
    ),
    ({}, {"model.rope_theta": "1.0"}, "makes no pair turn slower", "model.rope_theta=10000"),
]


@pytest.mark.parametrize(("knobs", "keys", "why", "remedy"), REFUSED)
def test_what_cannot_be_scaled_is_refused(
    tiny_plan: Callable[..., Any],
    knobs: dict[str, Any],
    keys: dict[str, str],
    why: str,
    remedy: str,
) -> None:
    plan = tiny_plan(*(f"{key}={value}" for key, value in keys.items()))
    context = make_context(plan, torch.device("cpu"))
    answer = Yarn.model_validate({"original_length": 8, **knobs}).supports(context)
    assert isinstance(answer, Unsupported)
    assert why in answer.reason and answer.remedy.text.startswith(remedy)
    if "original_length" in remedy:
        near = int(answer.remedy.text.partition("=")[2])
        again = Yarn.model_validate({**knobs, "original_length": near})
        assert isinstance(again.supports(context), Supported)


@pytest.mark.parametrize("kind", [*KINDS, "dynamic"])
def test_an_exported_run_computes_the_same_in_transformers(
    tmp_path: Path, plan_file: Path, zygote: Any, kind: str
) -> None:
    knobs = [f"techniques.yarn.kind={kind}", *TINY]
    plan = [str(plan_file), "model.head_dim=8", "goal.steps=4", "name=far", *knobs]
    trained = zygote.run(tmp_path, "train", *plan, "--with", "yarn")
    assert trained.code == 0, trained.err
    ended = zygote.run(tmp_path, "export", "far", "--to", "hf", "--output", "out")
    assert ended.code == 0, ended.err
    transformers = pytest.importorskip("transformers")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").float()
    from headrace.cli.catalogue import catalogue
    from headrace.inference.load import open_model
    from headrace.model.mask import Rows

    ours = open_model(tmp_path / "runs" / "far", catalogue()).model
    ids = torch.arange(30)[None]
    with torch.no_grad():
        expected = theirs(ids).logits
        found = ours.logits(ids, Rows(ids))
        ours.position = RotaryPosition(ours.config)
        unscaled = ours.logits(ids, Rows(ids))
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    assert (unscaled - expected).abs().max() > 1e-4
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert ("rope_scaling" in written) == (kind != "ntk")


def test_sampling_goes_on_in_scaled_angles(make_tiny: Callable[..., Build]) -> None:
    from headrace.model.mask import Rows

    build = make_tiny(*TINY)
    found = generate(build.model, torch.arange(5)[None], new_tokens=6, temperature=0)
    for end in range(5, 11):
        logits = build.model.logits(found[:, :end], Rows(torch.arange(end)[None]))
        assert int(logits[0, -1].argmax()) == int(found[0, end])

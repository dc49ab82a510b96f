"""A budget buys the plan of lowest expected loss, which trains and is explained as any other."""

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from typer.testing import CliRunner

from headrace.assemble.context import elsewhere, make_context
from headrace.cli.app import app
from headrace.cli.budget import BARE
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.core.limits import LARGEST_BATCH
from headrace.costs.machine import Machine
from headrace.costs.passes import most_passes
from headrace.plan.plan import Plan
from headrace.predict.amounts import Budget, read_tokens
from headrace.predict.budget import Bought, buy
from headrace.predict.ladder import DIMS
from headrace.predict.page import format_bought

H100 = "NVIDIA H100"


def bought(text: str, *overrides: str, base: str = BARE, **how: Any) -> Bought:
    """What a budget buys on an H100."""
    plan = Plan.read(base, catalogue(), overrides=list(overrides))
    there = elsewhere(make_context(plan, torch.device("cpu")), H100)
    return buy(Budget.read(text), plan, there, Machine.assumed(H100), **how)


@pytest.mark.parametrize(
    ("text", "amount", "unit"),
    [
        ("100usd", 100, "usd"),
        ("$2.5", 2.5, "usd"),
        ("8gpu-hours", 8, "gpu-hours"),
        ("8 GPU hours", 8, "gpu-hours"),
        ("30gpu-minutes", 0.5, "gpu-hours"),
        ("3e19flops", 3e19, "flops"),
        ("3E19 FLOPs", 3e19, "flops"),
    ],
)
def test_a_budget_is_read(text: str, amount: float, unit: str) -> None:
    budget = Budget.read(text)
    assert (budget.amount, budget.unit) == (pytest.approx(amount), unit)
    assert Budget.read(str(budget)) == budget


@pytest.mark.parametrize(
    ("text", "near"),
    [
        ("100", "100gpu-hours"),
        ("8gpu", "8gpu-hours"),
        ("3e19flip", "3e19flop"),
        ("-3usd", "1gpu"),
        ("$5 gpu-hours", "5gpu-hours"),
        ("1e30usd", "1e12usd"),
    ],
)
def test_no_budget_is_refused_with_the_nearest(text: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        Budget.read(text)
    assert near in caught.value.remedy.text
    assert Budget.read(caught.value.remedy.text.removeprefix("--budget "))


def test_tokens_are_read() -> None:
    assert [read_tokens(t) for t in ("300M", "1.5B", "2e9", "5k")] == [3e8, 1.5e9, 2e9, 5e3]
    for wrong in ("many", "3q", "0", "1e30", "$5M"):
        with pytest.raises(ConfigError):
            read_tokens(wrong)


def test_what_a_technique_says_of_the_plan_stays_said() -> None:
    """The plan that is bought can be read again, with the warmup and the heads that were asked."""
    one = bought("1e16flops", "techniques.warmup.steps=7", "techniques.gqa.queries_per_key=2")
    assert one.plan.schedule.warmup_steps == 7
    assert one.plan.model.heads == 2 * one.plan.model.kv_heads
    assert Plan.read(one.plan.to_toml(), catalogue()) == one.plan


def test_rates_beside_an_optimizer_of_its_own_are_the_plans() -> None:
    """Step Law is about AdamW alone, and a rate beside Muon was chosen with it."""
    one = bought("1e16flops", "optimizer.lr=0.0021", "techniques.muon.lr=0.02")
    assert one.keeps_rates and one.plan.optimizer.lr == 0.0021
    assert tells(format_bought(one), "learning rate 0.0021", "the plan's own")
    assert not bought("1e16flops", "optimizer.lr=0.0021").keeps_rates
    # Its batch stays too, where it is larger than Step Law's and leaves steps enough.
    own = [
        bought("1e17flops", "techniques.muon.lr=0.02", f"batch.tokens={n}") for n in (2**17, 1024)
    ]
    assert own[0].plan.batch.tokens == 2**17 > own[1].plan.batch.tokens > 1024
    assert bought("1e14flops", "techniques.muon.lr=0.02", "batch.tokens=131072").steps > 150


def test_tokens_of_a_growing_batch_are_those_that_are_read() -> None:
    one = bought("1e16flops", "techniques.batch_ramp.divide=2", "techniques.batch_ramp.until=4.0")
    assert one.tokens == one.plan.batches.before(one.steps)
    assert one.tokens == (one.steps - 2) * one.plan.batch.tokens


@pytest.mark.parametrize("until", [0.9, 0.3, 500])
@pytest.mark.parametrize("budget", ["1gpu-hours", "1e16flops"])
def test_a_growing_batch_spends_the_budget(budget: str, until: float) -> None:
    """Its stages end at shares of the steps, so that one step more moves all of them."""
    grows = ("techniques.batch_ramp.divide=16", f"techniques.batch_ramp.until={until}")
    one = bought(budget, *grows)
    assert 0.999 < one.spent <= 1 and one.tokens == one.plan.batches.before(one.steps)
    longer = one.plan.replaced(goal={"steps": one.steps + 1}, schedule={"steps": one.steps + 1})
    assert longer.batches.before(one.steps + 1) > one.tokens / one.spent
    if budget.endswith("hours"):
        assert one.prediction.run.hours == pytest.approx(1, rel=0.01)
    else:
        assert one.flops == pytest.approx(1e16, rel=1e-3)


def test_shapes_that_a_plan_cannot_have_are_left_out() -> None:
    """Two layers have one table of values at most, and the ladder begins with them."""
    words, tables = ("techniques.value_embeddings.tables=2",), "value_embeddings"
    for fresh in (None, 1e5, 1e7):
        one = bought("1e17flops", *words, fresh_tokens=fresh)
        assert getattr(one.plan.model, tables) == 2 and one.plan.model.layers > 2


def test_checkpoints_fall_on_steps_at_which_a_technique_can_save() -> None:
    asked = bought("1e16flops", "techniques.spike_rewind.every=25", "checkpoint.every_steps=100")
    usual = bought("1e16flops", "techniques.spike_rewind={}")
    brief = bought("1gpu-hours", "techniques.spike_rewind={}", fresh_tokens=5e4)
    plain = bought("1e16flops")
    assert asked.plan.checkpoint.every_steps % 25 == 0 == usual.plan.checkpoint.every_steps % 50
    for one in (asked, usual, brief, plain):
        tenth = -(-one.steps // 10)
        assert tenth <= one.plan.checkpoint.every_steps < tenth + 50
    assert plain.plan.checkpoint.every_steps == -(-plain.steps // 10)
    assert brief.plan.checkpoint.every_steps == -(-brief.steps // 10) < 50


def test_no_budget_buys_a_larger_batch_than_there_are() -> None:
    one = bought("1e30flops")
    assert one.plan.batch.tokens == LARGEST_BATCH and one.spent == pytest.approx(1)
    three = bought("1e30flops", "mesh.data=3", "batch.tokens=9216").plan.batch.tokens
    assert LARGEST_BATCH / 2 < three <= LARGEST_BATCH


def test_a_budget_of_images_is_refused_with_the_plan_itself() -> None:
    told = CliRunner().invoke(app, ["plan", "vision-demo", "--budget", "1gpu-hours"])
    assert told.exit_code == 3 and "decoder of text" in told.stderr
    assert "try: headrace plan vision-demo" in told.stderr


def test_more_buys_a_lower_loss_and_a_larger_model() -> None:
    each = [bought(f"{amount}gpu-hours") for amount in (0.02, 0.5, 8)]
    assert all(a.loss.nats > b.loss.nats for a, b in pairwise(each))
    assert all(a.parameters < b.parameters for a, b in pairwise(each))
    for one in each:
        plan, model = one.plan, one.plan.model
        assert one.prediction.memory.fits == "yes" and one.too_large is None
        assert model.dim in DIMS and model.dim % 64 == 0 and model.resolved_ffn % 64 == 0
        assert model.resolved_head_dim in (64, 128) and model.heads * model.head_dim == model.dim
        assert plan.goal.steps == plan.schedule.steps == one.steps and one.steps > 100
        assert one.tokens == one.steps * plan.batch.tokens and plan.batch.tokens % 1024 == 0
        assert one.plan.optimizer.lr <= 2**-7 and 0 < plan.schedule.warmup_steps <= one.steps / 10
    # The hours that are predicted of the plan are those of the budget, less a part of a step.
    hours = each[1].prediction.run.hours
    assert hours is not None and 0.49 < hours <= 0.5
    assert tells(format_bought(each[1]), "parameters", "681M tokens", "(Chinchilla: 20)")


def test_flops_buy_what_the_law_takes_where_memory_allows_it() -> None:
    one = bought("3e19flops")
    assert one.flops == pytest.approx(3e19, rel=1e-3)
    assert 10 < one.tokens_per_parameter < 40  # compute-optimal, on a ladder of shapes
    repeated = bought("3e19flops", fresh_tokens=1e9)
    assert repeated.loss.nats > one.loss.nats and not (repeated.text_ends or one.text_ends)
    assert repeated.spent == pytest.approx(1, rel=1e-3) == one.spent
    assert repeated.loss.effective_tokens < repeated.tokens
    assert tells(format_bought(repeated), "epochs of 1B")
    held = bought("3e24flops")
    assert held.too_large is not None and held.too_large > held.parameters
    assert tells(format_bought(held), "memory holds it down")


def test_a_text_is_learned_by_heart_before_a_budget_is_spent() -> None:
    enough = bought("3e16flops", fresh_tokens=1e9)
    assert not enough.text_ends and enough.flops == pytest.approx(3e16, rel=0.01)
    brief = bought("3e18flops", fresh_tokens=1e7)
    passes = brief.tokens / 1e7
    assert 1 < passes <= most_passes(brief.parameters, 1e7) < passes * 1.05
    assert 0 < brief.spent < 1 and brief.to_dict()["spent"] == brief.spent and brief.text_ends
    assert tells(format_bought(brief), f"{brief.spent:.2g} of the budget", "by heart")
    pairs = bought("3e18flops", "techniques.bigram_embeddings.multiple=2", fresh_tokens=1e7)
    assert pairs.tokens < 1e7 * most_passes(pairs.parameters, 1e7)
    assert tells(format_bought(pairs), "--without bigram_embeddings buys a larger model")
    grown = bought("1gpu-hours", "techniques.batch_ramp.until=4.0", fresh_tokens=1e7)
    assert grown.prediction.run.hours is not None
    assert grown.spent == pytest.approx(grown.prediction.run.hours, rel=0.1)


@pytest.mark.parametrize("budget", ["3e15flops", "3e18flops", "1gpu-hours"])
def test_no_text_is_given_a_model_that_it_cannot_teach(budget: str) -> None:
    """Where the text binds, more of it buys a larger model, and more of a budget no smaller one."""
    each = [bought(budget, fresh_tokens=tokens) for tokens in (1e5, 1e6, 5e6, 2e7, 1e8)]
    bound = [one for one in each if one.spent < 0.5]
    assert all(a.parameters < b.parameters for a, b in pairwise(bound)) and len(bound) > 1
    for one in each:
        assert one.fresh_tokens is not None and one.too_large is None
        least = one.plan.model.dim == DIMS[0]
        assert one.parameters <= 16 * one.fresh_tokens or least
        more = bought(budget.replace("3e", "9e").replace("1g", "3g"), fresh_tokens=one.fresh_tokens)
        assert more.parameters >= one.parameters and more.loss.nats <= one.loss.nats + 0.2


def test_weights_that_are_given_are_not_held_to_the_passes() -> None:
    lora = bought("3e16flops", "techniques.lora.rank=8", fresh_tokens=1e5)
    assert not lora.text_ends and lora.tokens > 1e6


@pytest.mark.parametrize(
    ("tokens", "mends"), [(1, "--data 1024"), (700, "data.sequence_length=512")]
)
def test_a_text_shorter_than_a_step_is_refused(tokens: float, mends: str) -> None:
    with pytest.raises(ConfigError, match="is shorter than a step") as refused:
        bought("1gpu-hours", fresh_tokens=tokens)
    assert str(refused.value.remedy) == mends
    if "=" in mends:
        assert bought("1gpu-hours", mends, fresh_tokens=tokens).steps >= 1


def test_warmups_of_techniques_end_with_a_brief_run() -> None:
    words = ("techniques.muon.momentum_warmup_steps=100", "techniques.warmup.steps=40")
    one = bought("1gpu-hours", *words, fresh_tokens=5e4)
    assert one.steps < 200
    knobs = {name: technique.model_dump() for name, technique in one.plan.techniques.items()}
    assert knobs["muon"]["momentum_warmup_steps"] <= one.steps
    assert knobs["warmup"]["steps"] <= one.steps / 4


def test_further_tables_are_no_parameters_of_the_law() -> None:
    """Pairs and values of tokens cost no product: the shape stays, and they are told beside it."""
    plain = bought("1e16flops")
    pairs = bought("1e16flops", "techniques.bigram_embeddings.multiple=2")
    values = bought("1e16flops", "model.value_embeddings=1")
    model = plain.plan.model
    for one in (pairs, values):
        assert one.parameters == pytest.approx(plain.parameters, rel=1e-5)  # factors are trained
        assert one.tokens == pytest.approx(plain.tokens, rel=1e-3)
        assert one.plan.model.dim == model.dim and one.plan.model.layers == model.layers
    vocab = plain.plan.data.vocab
    assert (plain.tables, pairs.tables) == (0, 2 * vocab * model.dim)
    assert values.to_dict()["parameters_in_tables"] == vocab * model.dim


def test_money_and_ranks_buy_hours() -> None:
    price = "hardware.dollars_per_hour=2"
    money, hours = bought("4usd", price), bought("2gpu-hours", price)
    assert money.tokens == hours.tokens and money.parameters == hours.parameters
    assert money.prediction.run.dollars == pytest.approx(4, rel=0.02)
    two = Plan.read(BARE, catalogue(), overrides=["mesh.data=2"])
    assert Budget.read("2gpu-hours").seconds(two) == 3600


def test_a_plan_keeps_all_that_a_budget_does_not_choose() -> None:
    base = Plan.read(
        '[goal]\nsteps = 9\n[model]\nactivation = "relu2"\nheads = 4\nkv_heads = 2\n[data]\n'
        "vocab = 512\nsequence_length = 256\n[batch]\ntokens = 256\n[techniques.z_loss]\n",
        catalogue(),
    )
    one = bought("4e15flops", base=base.to_toml())
    plan = one.plan
    assert plan.techniques == base.techniques and plan.data == base.data
    assert plan.model.activation == "relu2" and plan.model.resolved_ffn == 4 * plan.model.dim
    assert plan.model.heads == 2 * plan.model.resolved_kv_heads


def test_the_plan_is_written_explained_and_trained(
    tmp_path: Path, corpus: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    keys = [f"data.sources='{corpus}'", "data.vocab=300", "data.sequence_length=16"]
    words = ["plan", "--budget", "1e11flops", *keys, "device=cpu", "batch.tokens=64"]
    told = CliRunner().invoke(app, [*words, "--data", "1M", "--out", "bought.toml", "--json"])
    assert told.exit_code == 0, told.output
    said = json.loads(told.stdout)
    plan = Plan.read(Path("bought.toml").read_text(), catalogue())
    assert plan.dump() == said["plan"] and plan.goal.steps == said["steps"]
    assert "tokens a parameter (Chinchilla: 20)" in " ".join(
        Path("bought.toml").read_text().split()
    )
    for more in (["explain", "bought.toml"], ["train", "bought.toml", "goal.steps=2"]):
        ended = CliRunner().invoke(app, more)
        assert ended.exit_code == 0, ended.output
    alone = [*words, "--data", "1M", "--out", "bought.toml"]
    assert CliRunner().invoke(app, alone).output.endswith("next: headrace train bought.toml\n")
    two = CliRunner().invoke(app, [*alone, "mesh.data=2"]).output
    assert two.endswith("next: torchrun --nproc-per-node 2 -m headrace train bought.toml\n")

"""A value or a key as others write it is led to what a plan takes, and never to nonsense."""

import shlex
from typing import Any

import pytest
from facts import tells

from headrace.cli.catalogue import catalogue
from headrace.core.command import typed
from headrace.core.errors import ConfigError, alike, nearest
from headrace.core.foreign import OPTIONS, SAME, UNLIKE, meant_by
from headrace.core.guess import VALUES, choice
from headrace.core.known import BY_KEY, KNOWN, describe_known
from headrace.core.remedy import mend
from headrace.core.strict import field_at
from headrace.plan.plan import Plan
from headrace.plan.technique import installed

BASE = "goal.steps = 1000\nhardware.dollars_per_hour = 2\n"


def refusal(*overrides: str, **names: tuple[str, ...]) -> ConfigError:
    with pytest.raises(ConfigError) as caught:
        Plan.read(BASE, catalogue(), overrides=overrides, **names)
    return caught.value


def taken(*words: str) -> Plan:
    return Plan.read(BASE, catalogue(), overrides=words)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("goal.tokens=1M", "goal.tokens=1000000"),
        ("goal.tokens=2.5B", "goal.tokens=2500000000"),
        ("goal.tokens=300k tokens", "goal.tokens=300000"),
        ("goal.tokens=1,000,000", "goal.tokens=1000000"),
        ("goal.minutes=5m", "goal.minutes=5"),
        ("goal.minutes=2h", "goal.minutes=120"),
        ("goal.minutes=90 s", "goal.minutes=1.5"),
        ("goal.dollars=$5", "goal.dollars=5"),
        ("optimizer.lr=0,001", "optimizer.lr=0.001"),
        ("optimizer.lr=1e-3f", "optimizer.lr=0.001"),
        ("optimizer.lr=10%", "optimizer.lr=0.1"),
        ("optimizer.lr=fast", "optimizer.lr=0.001"),
        ("schedule.decay_fraction=20", "schedule.decay_fraction=0.2"),
        ("data.validation=5", "data.validation=0.05"),
        ("data.validation=500", "data.validation=0.05"),
        ("model.norm_eps=5", "model.norm_eps=1.0"),
        ("optimizer.betas=0.9,0.95", "optimizer.betas=[0.9,0.95]"),
        ("optimizer.betas=(0.8 0.99)", "optimizer.betas=[0.8,0.99]"),
        ("track.to=[wandb]", 'track.to=["wandb"]'),
        ("track.to=wandb", 'track.to=["wandb"]'),
        ("device=gpu", "device=cuda"),
        ("schedule.kind=WSD", "schedule.kind=warmup_stable_decay"),
        ("model.activation=silu", "model.activation=swiglu"),
    ],
)
def test_a_value_is_read_as_it_was_meant(override: str, remedy: str) -> None:
    given = refusal(override).remedy.text
    assert shlex.split(given)[0].replace(" ", "") == remedy
    taken(shlex.split(given)[0])


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        ("optimizer.learning_rate=3e-4", "optimizer.lr=0.0003"),
        ("lr=3e-4", "optimizer.lr=0.0003"),
        ("train.lr=3e-4", "optimizer.lr=0.0003"),
        ("model.vocab_size=512", "model.vocab=512"),
        ("data.vocab_size=512", "data.vocab=512"),
        ("model.hidden_size=64", "model.dim=64"),
        ("techniques.gqa.kv_heads=4", "model.kv_heads=4"),
        ("techniques.muon.learning_rate=0.01", "techniques.muon.lr=0.01"),
        ("techniques.lora.r=8", "techniques.lora.rank=8"),
        ("techniques.lora.target_modules=qkv", "techniques.lora.targets=[]"),
        ("optimizer.name=muon", "--with muon"),
        ("optimizer.name=soap", "--with muon"),
        ("optimizer.name=lion", "--with lion"),
        ("optimizer.name=adamw", "leave out optimizer.name"),
        ("batch.size=8", "leave out batch.size"),
        ("schedule.warmup_ratio=0.1", "leave out schedule.warmup_ratio"),
        ("log.every=10", "leave out log.every"),
        ("gradient_checkpointing=true", "--with full_checkpoint"),
        ("gradient_checkpointing=false", "leave out gradient_checkpointing"),
    ],
)
def test_a_key_of_another_trainer_is_led_to_ours(override: str, remedy: str) -> None:
    assert " ".join(shlex.split(refusal(override).remedy.text)) == remedy


def test_every_foreign_key_leads_to_one_that_is_there() -> None:
    """Check that every foreign name leads to a key or option that exists, and no name to two."""
    for name, key in SAME.items():
        *above, last = key.split(".")
        if above[:1] == ["techniques"]:
            assert last in installed().techniques[above[1]].model_fields, name
        else:
            assert field_at(Plan, key.split(".")) is not None, name
    assert all(field_at(Plan, key.split(".")) is not None for key, _ in UNLIKE.values())
    assert not {*SAME} & {*UNLIKE} and not {*SAME} & {*OPTIONS} and not {*UNLIKE} & {*OPTIONS}
    for option in {*OPTIONS.values()}:
        words = shlex.split(option.text)
        if words[0] == "--with":
            installed().find(words[1])
        elif words != ["--resume"]:
            taken(words[0])


KINDS = ("0.5", "7", "true", "abc", "[1, 2]", "{}")
"""A value of each kind that may stand behind a key."""


def foreign_names(value: str, *, every: bool) -> dict[str, str]:
    """Return foreign names with the key that each means: every one, or one for each key.

    Which one depends on the value, so that other names have other values.
    """
    if every:
        return dict(SAME)
    names: dict[str, list[str]] = {}
    for name, key in SAME.items():
        names.setdefault(key, []).append(name)
    return {found[KINDS.index(value) % len(found)]: key for key, found in names.items()}


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.slow)])
@pytest.mark.parametrize("value", KINDS)
def test_what_is_offered_for_a_foreign_key_is_of_a_kind_that_the_key_takes(
    value: str, every: bool
) -> None:
    for name, key in foreign_names(value, every=every).items():
        if field_at(Plan, name.split(".")) is not None or key.startswith("techniques"):
            continue
        remedy = refusal(f"{name}={value}").remedy.text
        if not remedy.startswith("leave out"):
            try:
                taken(*shlex.split(remedy))
            except ConfigError as error:  # of the whole plan, as a batch that is no rows
                assert "nput should" not in error.message, (name, value, error.message)
                assert "no key" not in error.message


@pytest.mark.timeout(60)
def test_what_is_offered_is_followed_only_so_far() -> None:
    """Check that a foreign key with a wrong value leads to a right one, and does not run on."""
    assert refusal("hidden_size=7").remedy == mend("model.dim=8")
    assert refusal("hidden_size=7", "model.dim=7").remedy


def test_a_word_for_a_choice_is_one_of_them_somewhere() -> None:
    choices = {choice(word, [right]) for word, right in VALUES.items()}
    assert choices == {*VALUES.values()}
    assert choice("gpu", ["cpu"]) is None and choice("Layer-Norm", ["layer_norm"]) is None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("MUON", "--with muon"),
        ("muno", "--with muon"),
        ("muon=on", "--with muon"),
        ("techniques.muon", "--with muon"),
        ("z-loss", "--with z_loss"),
        ("muon,z_loss", "--with muon --with z_loss"),
        ("Flash-Attention-2", "flash_attention"),
        ("zero++", "zero"),
        ("cosine_decay", "schedule.kind=cosine"),
        ("lr_warmup", "schedule.warmup_steps=100"),
        ("wandb", 'track.to=["wandb"]'),
        ("grouped_query_attention", "gqa"),
        ("speculative_decoding", "list"),
        ("xyzzy", "list"),
        ("", "list"),
    ],
)
def test_a_name_behind_an_option_is_led_to_what_is_here(name: str, words: str) -> None:
    with typed(["train", "demo", "--with", name], {"--with"}):
        error = refusal(with_=(name,))
    remedy = shlex.split(error.remedy.text)
    assert remedy[0] == "headrace" and " ".join(remedy).endswith(f" {words}")
    assert name not in remedy and len(error.message) < 200, "all names are no guess"


def test_what_a_key_says_can_be_typed() -> None:
    assert not {*BY_KEY} & ({*KNOWN} | {*installed().techniques})
    for name, key in BY_KEY.items():
        taken(key)
        told = describe_known(name)
        assert told is not None and told[1] == key and tells(told[0], "key", "plan")


def test_the_nearest_of_one_is_no_guess() -> None:
    assert alike("5%", ["runs"]) is None and nearest("5%", ["runs"]) == "runs"
    assert alike("Run", ["runs", "data"]) == "runs"


def test_a_foreign_key_beside_its_own_table_is_looked_for_there_first() -> None:
    lora: Any = installed().techniques["lora"].model_fields
    found = meant_by("techniques.lora.lora_alpha", lora)
    assert found is not None and found.key == "techniques.lora.alpha"
    assert meant_by("nonsense") is None

"""Plans: every mistake is one message with the nearest right answer; a resolved plan reads back."""

import re
import tomllib
from pathlib import Path

import pytest
from facts import in_order
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.core.errors import EXIT_PLAN, ConfigError
from headrace.plan.plan import Plan
from headrace.recipes import read_recipe, recipes

CATALOGUE = catalogue()
BASE = "goal.steps = 10\n"

MISTAKES: dict[str, tuple[tuple[str, ...], tuple[str, ...], str]] = {
    # name: (overrides, what the message says, how the remedy begins)
    "a wrong key": (("model.hidden=64",), ("no key 'model.hidden'", "vocab"), ""),
    "a near key": (("batch.token=64",), ("no key 'batch.token'", "batch.tokens"), "batch.tokens"),
    "a near table": (("optimiser.lr=0.1",), ("'optimiser'", "optimizer"), "optimizer"),
    "a key too deep": (("seed.x=1",), ("seed",), ""),
    "through a value": (("name=a", "name.b=1"), ("'name'", "not a table"), ""),
    "a wrong type": (("model.layers=many",), ("model.layers = 'many'", "integer"), ""),
    "a float for a count": (("model.layers=2.5",), ("model.layers = 2.5", "integer"), ""),
    "below a range": (("model.layers=0",), ("model.layers = 0", "equal to 1"), "model.layers=1"),
    "above a range": (("data.validation=1.5",), ("data.validation",), ""),
    "at an open end": (("optimizer.lr=0",), ("optimizer.lr = 0", "greater than 0"), ""),
    "a wrong choice": (
        ("schedule.kind=cosin",),
        ("schedule.kind = 'cosin'", "warmup_stable_decay"),
        "schedule.kind=cosine",
    ),
    "a wrong device": (("device=gpu",), ("device = 'gpu'", "cuda"), "device="),
    "a wrong family": (("model.family=lama3",), ("'lama3'", "llama3"), "model.family=llama3"),
    "a wrong technique": (("techniques.muno.lr=0.1",), ("'muno'", "muon"), "[techniques.muon]"),
    "a wrong knob": (
        ("techniques.muon.momentun=0.1",),
        ("'techniques.muon.momentun'",),
        "techniques.muon.momentum",
    ),
    "a knob of none": (
        ("techniques.fused_cross_entropy.a=1",),
        ("'techniques.fused_cross_entropy.a'; techniques.fused_cross_entropy has no knobs",),
        "'techniques.fused_cross_entropy={}'",
    ),
    "a knob's range": (("techniques.muon.lr=-1",), ("techniques.muon.lr = -1",), ""),
    "a knob's choice": (
        ("techniques.torch_compile.scope=blok",),
        ("techniques.torch_compile.scope", "block"),
        "techniques.torch_compile.scope=block",
    ),
    "techniques that are no tables": (("techniques=3",), ("techniques must be tables",), ""),
    "heads that do not divide": (
        ("model.dim=100", "model.heads=3"),
        ("dim = 100", "heads = 3", "model.dim=102"),
        "",
    ),
    "groups that do not divide": (
        ("model.heads=6", "model.dim=48", "model.kv_heads=4"),
        ("kv_heads = 4", "kv_heads=3"),
        "",
    ),
    "groups beyond all counting": (
        ("model.heads=8", "model.kv_heads=100000"),
        ("heads = 8", "model.kv_heads=8"),
        "",
    ),
    "heads beyond all counting": (
        ("model.heads=100000000000",),
        ("model.heads = 100000000000",),
        "model.heads=100000",
    ),
    "rope on an odd head": (
        ("model.dim=21", "model.heads=3"),
        ("even head_dim", "7", "model.head_dim=8"),
        "",
    ),
    "a batch that is no rows": (
        ("batch.tokens=1000", "data.sequence_length=256"),
        ("1000", "256", "batch.tokens=1024"),
        "",
    ),
    "micro-batches that do not divide": (
        ("batch.tokens=2048", "data.sequence_length=256", "batch.micro_sequences=3"),
        ("micro_sequences = 3", "8 rows", "batch.micro_sequences=2"),
        "",
    ),
    "a micro-batch beyond the batch": (
        ("batch.tokens=512", "data.sequence_length=256", "batch.micro_sequences=5"),
        ("2 rows", "batch.micro_sequences=2"),
        "",
    ),
    "weights for other sources": (
        ('data.sources=["a", "b"]', "data.weights=[1.0]"),
        ("1 numbers for 2",),
        "",
    ),
    "a word near none": (("attention=fast",), ("not one of plan, measured",), "attention=plan"),
    "a negative weight": (("data.weights=[-1.0]",), ("data.weights",), ""),
    "dollars without a price": (("goal.dollars=3",), ("hardware.dollars_per_hour",), ""),
    "warmup past the end": (
        ("schedule.warmup_steps=11",),
        ("11", "step 10", "schedule.warmup_steps=10"),
        "",
    ),
    "a name that is a path": (("name=../x",), ("name = '../x'", "A-Z"), ""),
    "no finite number": (("optimizer.lr=inf",), ("optimizer.lr = inf", "finite"), ""),
    "minutes without an end": (("goal.minutes=inf",), ("goal.minutes = inf", "finite"), ""),
    "no override": (("model.dim",), ("'model.dim' is not an override",), "key=value"),
    "more digits than Python reads": (
        (f"batch.tokens={'1' * 5000}",),
        ("batch.tokens has a number of more than 64 bits",),
        "leave out batch.tokens",
    ),
    "more bits than a number has": (("seed=0x8" + "0" * 5000,), ("seed has", "64 bits"), ""),
    "one bit more": ((f"optimizer.lr={2**63}",), ("optimizer.lr has", "64 bits"), ""),
    "lists too deep": (("seed=" + "[" * 5000 + "]" * 5000,), ("seed has", "too deep"), ""),
    "lists less deep": (("seed=" + "[" * 99 + "]" * 99,), ("seed has", "too deep"), ""),
    "a key far too deep": (("seed" + ".a" * 5000 + "=1",), ("seed.a", "too deep"), ""),
}


def read(text: str = BASE, *overrides: str, **how: tuple[str, ...]) -> Plan:
    return Plan.read(text, CATALOGUE, overrides=overrides, **how)


@pytest.mark.parametrize("case", MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_one_message_with_what_is_right(
    case: tuple[tuple[str, ...], tuple[str, ...], str], tmp_path: Path
) -> None:
    overrides, says, remedy = case
    with pytest.raises(ConfigError) as caught:
        read(BASE, *overrides)
    for part in says:
        assert part in caught.value.message
    assert caught.value.remedy.text.startswith(remedy)
    assert "Value error" not in caught.value.message and "pydantic" not in str(caught.value)

    file = tmp_path / "plan.toml"
    file.write_text(BASE)
    ended = CliRunner().invoke(app, ["train", str(file), *overrides])
    assert ended.exit_code == EXIT_PLAN
    assert "Traceback" not in ended.output


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "the plan has no goal"),
        ("goal.minutes = 5", "must know where it ends"),
        ("goal.steps = ", "not valid TOML"),
        (f"goal.steps = {'1' * 5000}", "the plan has a number of more than 64 bits"),
        ("x = " + "[" * 5000 + "]" * 5000, "the plan has tables or lists too deep"),
        ("techniques.muon.lr" + ".a" * 5000 + " = 1", r"techniques\.muon\.lr\.a.* too deep"),
        ("goal = 3", "goal"),
        ("techniques = []\n" + BASE, "techniques must be tables"),
        ("techniques.muon = 3\n" + BASE, "techniques.muon"),
    ],
)
def test_a_text_that_is_no_plan(text: str, says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(text)


def test_a_file_that_is_no_plan_is_named_and_text_is_told_where_it_goes(tmp_path: Path) -> None:
    for name, remedy in (("novel.txt", "headrace train demo data.sources="), ("plan.toml", "")):
        file = tmp_path / name
        file.write_text("It was a dark and stormy night")
        with pytest.raises(ConfigError, match="is not valid TOML") as caught:
            read_recipe(str(file))
        assert caught.value.message.startswith(f"{file} is no plan")
        assert caught.value.remedy.text.startswith(remedy)
        assert bool(remedy) == bool(caught.value.remedy)


def test_the_largest_number_of_toml_is_read() -> None:
    assert read(BASE, f"seed={2**63 - 1}").seed == 2**63 - 1


@pytest.mark.parametrize("override", ["model=big", "model=3"])
def test_a_model_that_is_no_table(override: str) -> None:
    with pytest.raises(ConfigError, match="model"):
        read(BASE, override)


@pytest.mark.parametrize(("dim", "heads"), [(64, 3), (100, 3), (65, 4), (5, 4)])
@pytest.mark.parametrize("position", ["rope", "learned"])
def test_the_nearest_dim_is_one_that_works(dim: int, heads: int, position: str) -> None:
    asked = (f"model.heads={heads}", f"model.position={position}")
    with pytest.raises(ConfigError) as caught:
        read(BASE, f"model.dim={dim}", *asked)
    (works,) = re.findall(r"model\.dim=\d+", caught.value.message)
    read(BASE, works, *asked)


@pytest.mark.parametrize("word", ["null", "None", ""])
def test_a_number_that_is_none_is_told_how_a_key_is_left_unset(word: str) -> None:
    for key in ("goal.steps", "goal.minutes"):
        with pytest.raises(ConfigError, match=in_order(key, repr(word), "no number")) as told:
            read(BASE, f"{key}={word}")
        assert told.value.keys == (key,) and not told.value.remedy.changes
        assert told.value.remedy.text.startswith(f"leave {key} out")


def test_two_mistakes_are_both_told() -> None:
    with pytest.raises(ConfigError) as caught:
        read(BASE, "model.layers=0", "seed=-1")
    assert "model.layers" in caught.value.message and "seed" in caught.value.message


def test_a_resolved_plan_reads_back_equal() -> None:
    plan = read(
        BASE,
        "model.family=qwen3-0.6b",
        'data.sources=["a", "b"]',
        "data.weights=[1, 2.5]",
        "hardware.dollars_per_hour=2",
        "techniques.selective_checkpoint.every=2",
        with_=("muon", "document_packing"),
    )
    again = read(plan.to_toml())
    assert again == plan and again.to_toml() == plan.to_toml()
    assert type(again.techniques["muon"]) is CATALOGUE.find("muon")
    assert tomllib.loads(plan.to_toml())["techniques"]["selective_checkpoint"]["every"] == 2


def test_layers_win_in_order() -> None:
    text = BASE + "[model]\nfamily = 'headrace-mini'\nlayers = 3\n"
    family = CATALOGUE.families["headrace-mini"]
    plan = read(text, "model.heads=1")
    assert plan.model.layers == 3 and plan.model.heads == 1
    assert family["dim"] == plan.model.dim != Plan.model_fields["model"].default.dim


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("data.sources=some words", "some words"),
        ("data.sources='quoted'", "quoted"),
        ("data.sources=a=b", "a=b"),
        ('data.sources=["x", "y"]', ("x", "y")),
        ("data.sources=./a/b.txt", "./a/b.txt"),
    ],
)
def test_overrides_are_toml_or_bare_words(override: str, value: object) -> None:
    assert read(BASE, override).data.sources == value


def test_later_overrides_win_and_numbers_are_numbers() -> None:
    plan = read(BASE, "optimizer.lr=1", "optimizer.lr=2e-3", "model.bias=true", "goal.steps=1_000")
    assert plan.optimizer.lr == 2e-3 and plan.model.bias is True and plan.goal.steps == 1000


def test_with_and_without() -> None:
    text = BASE + "[techniques.muon]\nlr = 0.5\n"
    kept = read(text, with_=("muon", "document_packing"))
    assert kept.techniques["muon"].model_dump()["lr"] == 0.5
    assert set(kept.techniques) == {"muon", "document_packing"}
    assert set(read(text, without=("muon",)).techniques) == set()
    assert set(read(BASE, without=("muon",)).techniques) == set()
    for how in ({"with_": ("mouon",)}, {"without": ("mouon",)}):
        with pytest.raises(ConfigError, match="did you mean muon"):
            read(BASE, **how)


@pytest.mark.parametrize(
    ("wrong", "works"),
    [
        ("techniques.dynamic_batch.headroom=1", "techniques.dynamic_batch.headroom=0.05"),
        ("optimizer.lr=0", "optimizer.lr=0.001"),  # a bound that is not allowed itself is none
        ("model.layers=0", "model.layers=1"),
        ("model.dim=big", "model.dim=256"),
        ("goal.minutes=5m", "goal.minutes=5"),
        ("name='two words!'", "name=two-words"),
    ],
)
def test_a_wrong_value_is_told_one_that_works(wrong: str, works: str) -> None:
    with pytest.raises(ConfigError) as caught:
        read(BASE, wrong)
    assert caught.value.remedy.text == works
    read(BASE, works)


def test_derived_numbers() -> None:
    plan = read(BASE, "batch.tokens=2048", "data.sequence_length=256", "batch.micro_sequences=2")
    assert (plan.rows_per_step, plan.micro_rows, plan.horizon_steps) == (8, 2, 10)
    assert read(BASE, "goal.tokens=100", "batch.tokens=512").horizon_steps == 1
    assert read(BASE, "schedule.steps=7").horizon_steps == 7
    assert read("goal.minutes=1\nschedule.kind='constant'").horizon_steps is None


def test_a_recipe_by_name_or_by_path(tmp_path: Path) -> None:
    file = tmp_path / "mine.toml"
    file.write_text(BASE)
    assert read_recipe(str(file)) == BASE
    assert read_recipe("demo") == recipes()["demo"].read_text()
    with pytest.raises(ConfigError, match="nearest recipe is demo") as caught:
        read_recipe("dmeo")
    assert caught.value.remedy.text == "headrace train demo"
    own = tmp_path / "runs" / "mine" / "plan.toml"
    own.parent.mkdir(parents=True)
    own.write_text(BASE)
    for is_a in ("folder", "run"):
        goes_on = " --resume" if is_a == "run" else ""
        for verb, asked in (("plan", f"plan {own}"), ("train", f"train {own}{goes_on}")):
            with pytest.raises(ConfigError, match=in_order(own.parent, is_a, own)) as caught:
                read_recipe(str(own.parent), verb)
            assert caught.value.remedy.text == f"headrace {asked}"
        (own.parent / "environment.json").write_text("{}")
    own.rename(own.with_name(".plan.toml"))
    for name in (own.parent, own):
        with pytest.raises(ConfigError, match=in_order(own, "gone")) as caught:
            read_recipe(str(name))
        assert caught.value.remedy.text == f"cp {own.with_name('.plan.toml')} {own}"
    file.write_bytes(b'name = "caf\xe9"')
    with pytest.raises(ConfigError, match=in_order(file, "not UTF-8")):
        read_recipe(str(file))


def test_a_plan_cannot_be_changed_in_place() -> None:
    plan = read()
    with pytest.raises(ValueError, match="frozen"):
        plan.seed = 3  # type: ignore[misc]
    assert plan.replaced(seed=3).seed == 3 and plan.seed == 0
    with pytest.raises(ConfigError, match="seed"):
        plan.replaced(seed=-1)

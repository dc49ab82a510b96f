"""A config of another trainer is made a plan, which has a line for every key."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.files import toml_value
from headrace.migrate.axolotl import import_axolotl
from headrace.migrate.draft import Draft, Fate, Imported, KeyLine, flat
from headrace.migrate.litgpt import import_litgpt
from headrace.migrate.nanochat import import_nanochat
from headrace.migrate.read import read_yaml
from headrace.migrate.torchtitan import import_torchtitan

CONFIGS = Path(__file__).parent / "configs"
IMPORTS = {
    "torchtitan": import_torchtitan,
    "axolotl": import_axolotl,
    "litgpt": import_litgpt,
    "nanochat": import_nanochat,
}
FILES = sorted(path.name for path in CONFIGS.iterdir())


def imported(name: str, ranks: int = 1) -> Imported:
    """Return what a config of the tests becomes."""
    return draft(name, ranks).finish(catalogue(), name)


def draft(name: str, ranks: int = 1) -> Draft:
    """Return the draft of a config of the tests."""
    return IMPORTS[name.partition("_")[0]](CONFIGS / name, ranks)


def line(made: Imported, key: str) -> KeyLine:
    """Return what became of a key."""
    return next(one for one in made.lines if one.key == key)


@pytest.mark.parametrize("name", FILES)
def test_every_key_has_a_line_and_every_word_is_in_the_plan(name: str) -> None:
    made, values = imported(name), draft(name).values
    assert {one.key for one in made.lines if one.key in values} == {*values}
    for one in made.lines:
        if one.fate in (Fate.LEFT, Fate.NEAREST, Fate.IDLE, Fate.ADDED) and not one.words:
            assert one.why, one
        for word in one.words:
            if word.startswith("--with "):
                assert word.removeprefix("--with ") in made.plan.techniques
                continue
            path, _, value = word.partition("=")
            stands: Any = made.plan.dump()
            for part in path.split("."):
                stands = stands[part]
            assert stands == toml_value(value, path), one
    for fate in (Fate.LEFT, Fate.NEAREST):
        for one in made.lines:
            if one.fate is fate:
                assert f"{one.key} = " in made.toml


def test_torchtitan_counts_its_batch_and_its_mesh() -> None:
    made = imported("torchtitan_8b.toml", ranks=64)
    plan = made.plan
    assert plan.model.family == "llama3-8b" and plan.model.layers == 32
    assert plan.mesh.sizes == {"data": 32, "tensor": 2, "context": 1, "pipeline": 1}
    assert plan.batch.tokens == 2 * 32 * 4096 and plan.batch.micro_sequences == 2
    assert {"fsdp", "tensor_parallel", "torch_compile", "float8_linear"} <= {*plan.techniques}
    assert plan.schedule.kind == "warmup_stable_decay"
    assert plan.schedule.decay_fraction == pytest.approx(1850 / 2000)
    assert plan.optimizer.clip_norm == 0.5 and plan.trace.every_steps == 50
    assert line(made, "model.tokenizer_path").fate is Fate.LEFT
    assert line(made, "float8.filter_fqns").fate is Fate.LEFT
    assert plan.techniques["fsdp"].gather == "fp8"
    assert plan.techniques["tensor_parallel"].asynchronous
    assert line(made, "job.description").fate is Fate.LEFT


def test_torchtitan_later_names() -> None:
    plan = imported("torchtitan_debug.toml").plan
    assert (plan.model.dim, plan.model.layers, plan.model.ffn) == (256, 6, 768)
    assert plan.mesh.data == 4 and plan.batch.tokens == 4 * 4 * 512
    assert plan.schedule.decay_shape == "sqrt" and plan.schedule.final_fraction == 0.1
    assert plan.checkpoint.every_steps == 0 and plan.eval.every_steps == 5
    assert plan.data.tokenizer == "./assets/tokenizer"
    assert "torch_compile" not in plan.techniques


def test_a_model_that_is_not_here_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[model]\nname = "deepseek_v3"\nflavor = "16B"\n')
    with pytest.raises(UnsupportedError, match="deepseek_v3") as caught:
        import_torchtitan(file, 1)
    assert "llama3/8B" in caught.value.message


def test_axolotl_adapters_of_a_quantized_base() -> None:
    made = imported("axolotl_lora.yml")
    qlora: Any = made.plan.techniques["qlora"]
    assert (qlora.rank, qlora.alpha, qlora.base, qlora.dropout) == (24, 12.0, "int8", 0.1)
    assert qlora.train_also == ("embedding", "head")
    assert made.plan.optimizer.lr == 3e-4 and made.plan.optimizer.weight_decay == 0.01
    assert made.plan.batch.tokens == 2 * 8 * 1024
    assert made.plan.source_list == ("hf:some-hub/recipes",)
    assert made.plan.data.chat is not None
    assert "--epochs 3" in line(made, "num_epochs").why
    assert line(made, "evals_per_epoch").fate is Fate.LEFT
    assert {"adamw_8bit", "full_checkpoint", "best_fit_packing", "tf32"} <= {*made.plan.techniques}


def test_axolotl_pretraining_and_pairs() -> None:
    plan = imported("axolotl_pretrain.yml", ranks=8).plan
    assert plan.mesh.data == 8 and plan.batch.tokens == 4 * 2 * 8 * 1024
    assert plan.goal.steps == 500 and plan.schedule.warmup_steps == 10
    assert plan.source_list == ("hf:some-hub/pages:en@train",)
    assert {"muon", "fsdp"} <= {*plan.techniques} and plan.seed == 7
    pairs = imported("axolotl_pairs.yml").plan
    assert pairs.techniques["preference"].beta == 0.2
    assert pairs.techniques["qlora"].targets == ("mixer.qkv", "mlp.down")
    assert pairs.data.chat is not None and pairs.data.chat.kind == "preference"
    assert pairs.optimizer.betas == (0.9, 0.98) and pairs.checkpoint.keep_last == 3


def test_litgpt() -> None:
    plan = imported("litgpt_pretrain.yaml").plan
    assert (plan.model.dim, plan.model.heads, plan.model.kv_heads) == (256, 8, 4)
    assert plan.model.tied_embeddings and plan.model.vocab == 16000
    assert plan.goal.tokens == 100_000_000 and plan.batch.tokens == 256 * 256
    assert plan.eval.before and plan.eval.tokens == 50 * 64 * 256
    assert plan.track.to == ("tensorboard",)
    made = imported("litgpt_lora.yaml")
    assert made.plan.techniques["qlora"].targets == ("mixer.out", "mixer.qkv")
    assert made.plan.schedule.final_fraction == pytest.approx(0.3)
    assert line(made, "data.class_path").fate is Fate.LEFT


def test_nanochat_computes_what_its_script_does() -> None:
    made = imported("nanochat_speedrun.sh")
    plan = made.plan
    assert (plan.model.layers, plan.model.dim, plan.model.heads) == (24, 1536, 12)
    parameters = 12 * 24 * 1536**2 + 32768 * 1536
    assert plan.batch.tokens == 2**20 and plan.mesh.data == 8
    assert plan.goal.steps == int(9.5 * parameters // 2**20)
    assert (plan.model.window, plan.model.window_between) == (1024, 3)
    assert {"muon", "float8_linear", "torch_compile"} <= {*plan.techniques}
    assert plan.techniques["muon"].lr == pytest.approx(0.02 * 2**0.5, rel=1e-4)
    assert line(made, "run").fate is Fate.LEFT
    tiny = imported("nanochat_cpu.sh").plan
    assert tiny.goal.steps == 20 and tiny.batch.tokens == 512 and tiny.model.window == 0
    kept = imported("nanochat_meta.json")
    assert kept.plan.model.layers == 6 and line(kept, "frozen_embd").fate is Fate.LEFT
    options = imported("nanochat_options.py")
    assert options.plan.name == "small-one" and line(options, "computed").fate is Fate.LEFT


def test_a_value_that_a_plan_refuses_is_left_out_with_the_reason(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text('[optimizer]\nlr = "fast"\neps = 7\n[training]\nseed = -3\n')
    made = import_torchtitan(file, 1).finish(catalogue(), "x")
    for key in ("optimizer.lr", "optimizer.eps", "training.seed"):
        assert line(made, key).fate is Fate.LEFT and line(made, key).why
    assert made.plan.optimizer.lr == 1e-3


def test_an_unknown_key_names_the_nearest(tmp_path: Path) -> None:
    file = tmp_path / "x.toml"
    file.write_text("[training]\ngrad_clip = 3.0\nmystery = 4\n")
    made = import_torchtitan(file, 1).finish(catalogue(), "x")
    assert "optimizer.clip_norm" in line(made, "training.grad_clip").why
    assert line(made, "training.mystery").why == "a plan has no such key"


@pytest.mark.parametrize(
    "text", ["a: &x [1]\nb: *x\n", "[1, 2]", "a: [", "!!python/object/apply:os.system ['x']", ""]
)
def test_yaml_that_is_no_config_is_refused(text: str, tmp_path: Path) -> None:
    file = tmp_path / "x.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError):
        read_yaml(file)


def test_a_file_with_too_many_keys_is_refused() -> None:
    with pytest.raises(ConfigError, match="over 10,000 keys"):
        flat({str(n): n for n in range(10_001)}, "x")


def test_the_verb_prints_a_plan_that_is_read_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    config = str(CONFIGS / "torchtitan_debug.toml")
    ended = CliRunner().invoke(app, ["import", "torchtitan", config], prog_name="headrace")
    assert ended.exit_code == 0 and "carried" in ended.stderr
    Path("made.toml").write_text(ended.stdout)
    again = CliRunner().invoke(app, ["explain", "made.toml", "--json"], prog_name="headrace")
    assert again.exit_code == 0, again.output
    ended = CliRunner().invoke(
        app, ["import", "torchtitan", config, "--out", "new.toml"], prog_name="headrace"
    )
    assert ended.exit_code == 0 and "optimizer.lr" in ended.stdout
    assert Path("new.toml").read_text() == Path("made.toml").read_text()
    ended = CliRunner().invoke(
        app, ["import", "torchtitan", config, "--json"], prog_name="headrace"
    )
    told = json.loads(ended.stdout)
    assert told["exit_code"] == 0 and {one["fate"] for one in told["keys"]} <= {*Fate}

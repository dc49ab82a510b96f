"""What came with the first weights is in the export: templates, settings, ids and positions."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from facts import tells

from headrace.core.model_config import ModelConfig
from headrace.model.hf_config import config_to_hf, merged_config

TEMPLATE = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
WORDS = ["goal.steps=1", "schedule.warmup_steps=0", "model.pretrained=base"]


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory, corpus: Path) -> Path:
    """A tiny chat model, as `save_pretrained` of transformers writes it."""
    transformers = pytest.importorskip("transformers")
    from headrace.data.tokenizer import train_tokenizer

    folder = tmp_path_factory.mktemp("hub") / "base"
    made = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    train_tokenizer([file.read_text() for file in corpus.iterdir()], vocab=300).save(made)
    tokenizer = transformers.PreTrainedTokenizerFast(
        tokenizer_file=str(made),
        eos_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        chat_template=TEMPLATE,
        model_max_length=4096,
    )
    config = transformers.LlamaConfig(
        vocab_size=300,
        hidden_size=16,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=4096,
        initializer_range=0.05,
        bos_token_id=1,
        eos_token_id=[299, 7],
        pad_token_id=5,
    )
    model = transformers.LlamaForCausalLM(config)
    model.generation_config.update(temperature=0.6, top_p=0.9, do_sample=True)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    (folder / "modeling_own.py").write_text("raise SystemExit('code of a stranger ran')")
    (folder / "generation_notes.txt").write_text("not a file that transformers writes")
    return folder


@pytest.fixture
def here(base: Path, tmp_path: Path) -> Path:
    """Return a test's own folder with a copy of the model in it."""
    shutil.copytree(base, tmp_path / "base")
    return tmp_path


def read(path: Path) -> dict[str, Any]:
    return json.loads(path.read_text())


def test_a_fine_tuned_chat_model_keeps_what_it_came_with(
    here: Path, plan_file: Path, zygote: Any
) -> None:
    transformers = pytest.importorskip("transformers")
    assert zygote.run(here, "train", str(plan_file), *WORDS, "name=chat").code == 0
    kept = {file.name for file in (here / "runs" / "chat" / "pretrained").rglob("*")}
    names = {"config.json", "generation_config.json", "tokenizer_config.json"}
    assert kept == {*names, "chat_template.jinja"}
    (here / "base").rename(here / "was")  # the run has copies of its own
    ended = zygote.run(here, "export", "chat", "--to", "hf", "--output", "out", "--json")
    assert ended.code == 0, ended.err
    told = json.loads(ended.out)
    assert (told["folder"], told["not_kept"]) == ("out", [])

    before, after = (
        (
            transformers.AutoModelForCausalLM.from_pretrained(here / name),
            transformers.AutoTokenizer.from_pretrained(here / name),
        )
        for name in ("was", "out")
    )
    talk = [{"role": "user", "content": "water"}]
    said = [t.apply_chat_template(talk, tokenize=False) for _, t in (before, after)]
    assert said[0] == said[1] == "<user>water"
    config = after[0].config
    assert config.eos_token_id == [299, 7] and (config.bos_token_id, config.pad_token_id) == (1, 5)
    assert config.max_position_embeddings == 4096 and config.initializer_range == 0.05
    assert config.rope_parameters == before[0].config.rope_parameters
    generation = after[0].generation_config.to_dict()
    assert generation == before[0].generation_config.to_dict()
    assert (generation["temperature"], generation["eos_token_id"]) == (0.6, [299, 7])
    own = after[1]
    assert (own.pad_token, own.model_max_length) == ("<|endoftext|>", 4096)
    assert before[1]("the mill")["input_ids"] == own("the mill")["input_ids"]
    assert not [*(here / "out").glob("*.py")]


def test_a_fork_keeps_the_copies_and_a_run_without_says_what_is_lost(
    here: Path, train: Callable[..., Path], zygote: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(here)
    words = [*WORDS, "name=own", "checkpoint.every_steps=1"]
    first = train(*words, "goal.steps=2")
    fork = train(*words, "goal.steps=2", resume=True, checkpoint="step-1")
    assert fork != first
    copies = [
        {f.name: f.read_bytes() for f in (run / "pretrained").iterdir()} for run in (first, fork)
    ]
    assert copies[0] == copies[1] and copies[0]
    shutil.rmtree(first / "pretrained")  # as in a run of before there were any
    ended = zygote.run(here, "export", "own", "--to", "hf", "--output", "near", "--json")
    assert "taken as they are" in ended.err
    assert json.loads(ended.out)["not_kept"] == []
    assert read(here / "near" / "config.json")["eos_token_id"] == [299, 7]
    shutil.rmtree(here / "base")
    ended = zygote.run(here, "export", "own", "--to", "hf", "--output", "far")
    assert ended.code == 0 and ended.out == "far\n"
    assert tells(ended.err, "not kept", "chat template") and len(ended.err.splitlines()) == 1
    ended = zygote.run(here, "export", "own", "--to", "hf", "--output", "x", "--json")
    assert "generation_config.json" in json.loads(ended.out)["not_kept"]


def test_a_run_from_random_weights_lost_nothing(plan_file: Path, zygote: Any) -> None:
    here = plan_file.parent
    assert zygote.run(here, "train", str(plan_file), "goal.steps=1", "name=own").code == 0
    ended = zygote.run(here, "export", "own", "--to", "hf", "--json")
    assert json.loads(ended.out)["not_kept"] == []


def test_files_that_cannot_be_taken_over_are_told(here: Path, plan_file: Path, zygote: Any) -> None:
    """Check that files that cannot be copied into an export are named, and fail no run."""
    base = here / "base"
    (base / "generation_config.json").write_text("{")
    (base / "special_tokens_map.json").write_text("[1]")
    (base / "added_tokens.json").write_text(" " * (8 << 20) + "{}")
    (base / "chat_template.jinja").write_bytes(b"\xff")
    (base / "pytorch_model.bin").write_bytes(b"no pickle is opened")
    ended = zygote.run(here, "train", str(plan_file), *WORDS, "name=bad")
    assert ended.code == 0, ended.err
    told = ended.out + ended.err
    assert "generation_config.json is not JSON" in told
    assert tells(told, "special_tokens_map.json", "no JSON object")
    assert "added_tokens.json has 8" in told and "chat_template.jinja is not UTF-8" in told
    assert "without it" in told
    assert tells(told, "read from model.safetensors", "not from pytorch_model.bin")
    ended = zygote.run(here, "export", "bad", "--to", "hf", "--output", "out")
    assert ended.code == 0, ended.err
    assert read(here / "out" / "generation_config.json")["eos_token_id"] == [299, 7]


def test_foreign_code_is_not_named_in_the_export(here: Path, plan_file: Path, zygote: Any) -> None:
    file = here / "base" / "tokenizer_config.json"
    own = {"auto_map": {"AutoTokenizer": ["own.Own", None]}, "tokenizer_class": "Own"}
    file.write_text(json.dumps(read(file) | own))
    (here / "base" / "additional_chat_templates").mkdir()
    (here / "base" / "additional_chat_templates" / "rag.jinja").write_text("{{ documents }}")
    assert zygote.run(here, "train", str(plan_file), *WORDS, "name=own").code == 0
    assert zygote.run(here, "export", "own", "--to", "hf", "--output", "out").code == 0
    written = read(here / "out" / "tokenizer_config.json")
    assert "auto_map" not in written
    assert written["tokenizer_class"] == "PreTrainedTokenizerFast"
    template = here / "out" / "additional_chat_templates" / "rag.jinja"
    assert template.read_text() == "{{ documents }}"


def test_a_scaled_rotation_is_the_folder_s(here: Path, plan_file: Path, zygote: Any) -> None:
    """A run begins with it, and its export says it again."""
    file = here / "base" / "config.json"
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "original_max_position_embeddings": 64,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
    }
    plain = read(file)
    file.write_text(json.dumps(plain | {"rope_parameters": None, "rope_scaling": scaling}))
    ended = zygote.run(here, "train", str(plan_file), *WORDS, "name=far")
    assert ended.code == 0, ended.err
    assert zygote.run(here, "export", "far", "--to", "hf", "--output", "out").code == 0
    written = read(here / "out" / "config.json")
    assert written["rope_scaling"] == scaling and "rope_parameters" not in written
    assert written["max_position_embeddings"] == 4096


def test_positions_are_the_longer_ones_unless_the_rotation_says_its_own() -> None:
    config = ModelConfig(vocab=320, dim=32, layers=2, heads=4)
    theirs = {"max_position_embeddings": 64, "torch_dtype": "float16", "attention_dropout": 0.1}
    ours = config_to_hf(config, sequence_length=100)
    merged = merged_config(ours, theirs, {})
    assert merged["max_position_embeddings"] == 100  # rows of training were longer
    assert merged["attention_dropout"] == 0.1 and "torch_dtype" not in merged
    own = {"max_position_embeddings": 48}
    assert merged_config(ours | own, theirs, own)["max_position_embeddings"] == 48


def test_gpt2_keeps_its_dropout_and_a_folder_of_another_class_its_ids_alone() -> None:
    config = ModelConfig(
        vocab=320,
        dim=32,
        layers=2,
        heads=4,
        norm="layer_norm",
        activation="gelu_tanh",
        position="learned",
        context=64,
        bias=True,
        tied_embeddings=True,
    )
    ours = config_to_hf(config, sequence_length=16)
    theirs = {"model_type": "gpt2", "resid_pdrop": 0.1, "pad_token_id": 3, "eos_token_id": [4, 5]}
    merged = merged_config(ours, theirs, {})
    assert merged["resid_pdrop"] == 0.1 and merged["embd_pdrop"] == 0.0
    assert merged["n_positions"] == 64 and merged["eos_token_id"] == [4, 5]
    other = merged_config(ours, theirs | {"model_type": "llama", "attention_dropout": 0.5}, {})
    assert other["pad_token_id"] == 3 and other["resid_pdrop"] == 0.0
    assert "attention_dropout" not in other and other["model_type"] == "gpt2"

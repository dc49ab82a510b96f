"""Which files of a folder are read, what an index may not say, and what is told of the rest."""

import json
import shlex
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells
from safetensors.torch import load_file, save_file
from state_dicts import to_theirs

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.model.adapter import files_left_out, load_pretrained
from headrace.model.decoder import Decoder
from headrace.model.hf_config import config_to_hf

INDEX = "model.safetensors.index.json"
FILES = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
NORM, DOWN = "model.norm.weight", "model.layers.0.mlp.down_proj.weight"


@pytest.fixture
def sharded(make_decoder: Callable[..., Decoder], tmp_path: Path) -> Path:
    """A folder of weights in two files, of which the second has the norm."""
    model = make_decoder()
    tensors = to_theirs(model.config, {n: p.detach() for n, p in model.named_parameters()})
    (tmp_path / "config.json").write_text(json.dumps(config_to_hf(model.config, sequence_length=9)))
    places = {name: FILES[name == NORM] for name in tensors}
    for file in FILES:
        save_file({n: t for n, t in tensors.items() if places[n] == file}, tmp_path / file)
    write_index(tmp_path, places)
    return tmp_path


def write_index(folder: Path, places: dict[str, Any]) -> None:
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))


def places_of(folder: Path) -> dict[str, Any]:
    return json.loads((folder / INDEX).read_text())["weight_map"]


LIES: dict[str, tuple[dict[str, str | None], str]] = {
    "in another file": ({NORM: FILES[0]}, f"places {NORM} in {FILES[0]}, and it is in {FILES[1]}"),
    "exchanged": ({NORM: FILES[0], DOWN: FILES[1]}, f"places {DOWN} in {FILES[1]}, and it is in"),
    "in no file": (
        {"ghost": FILES[1]},
        f"places ghost in {FILES[1]}, and no file of its set has it",
    ),
    "a file left out": ({NORM: None}, f"leaves out {NORM}, which {FILES[1]} has"),
    "left out": ({DOWN: None}, f"leaves out {DOWN}, which {FILES[0]} has"),
}


@pytest.mark.parametrize("lie", LIES)
def test_an_index_that_says_otherwise_than_its_files_is_refused(sharded: Path, lie: str) -> None:
    changes, told = LIES[lie]
    source = load_pretrained(sharded)[1]
    norm = source("norm.weight", torch.Size([24]))
    places = {**places_of(sharded), **changes}
    write_index(sharded, {name: file for name, file in places.items() if file})
    with pytest.raises(ConfigError) as caught:
        load_pretrained(sharded)
    assert told in caught.value.message
    command = caught.value.remedy.text.partition(", if")[0]
    subprocess.run(shlex.split(command), check=True)  # as a user would
    assert torch.equal(load_pretrained(sharded)[1]("norm.weight", norm.shape), norm)


def test_constants_of_older_files_may_be_left_out_of_an_index(sharded: Path) -> None:
    file = sharded / FILES[0]
    old = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(3)}
    save_file(load_file(file) | old, file)
    load_pretrained(sharded)


@pytest.mark.parametrize(
    "places",
    [{}, {NORM: 7}, {NORM: ["a"]}, {NORM: "../model.safetensors"}, {NORM: "absent.safetensors"}],
    ids=["empty", "a number", "a list", "outside", "absent"],
)
def test_an_index_of_nonsense_is_one_error(sharded: Path, places: dict[str, Any]) -> None:
    write_index(sharded, places)
    with pytest.raises(ConfigError, match=INDEX) as caught:
        load_pretrained(sharded)
    assert caught.value.remedy.text


def test_what_is_not_read_is_told_in_a_line(sharded: Path) -> None:
    assert files_left_out(sharded) == ""
    for name in ("adapter_model.safetensors", "pytorch_model.bin", "model.fp16.safetensors"):
        (sharded / name).write_bytes(b"")
    told = files_left_out(sharded)
    ignored = ("adapter_model.safetensors", "model.fp16.safetensors", "pytorch_model.bin")
    assert f"read from {', '.join([*FILES[:2], INDEX])}," in told
    assert f"not from {', '.join(ignored)};" in told
    assert tells(told, "adapter_model.safetensors", "not applied")
    assert load_pretrained(sharded)[0].dim == 24

    (sharded / "model.safetensors").write_bytes(b"")  # one file goes before an index
    told = files_left_out(sharded)
    assert "read from model.safetensors, as" in told and f"{FILES[1]} and 3 more" in told


def test_a_clone_without_its_large_files_is_told_how_to_fetch_them(sharded: Path) -> None:
    pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 4\n"
    (sharded / "model.safetensors").write_bytes(pointer)
    with pytest.raises(ConfigError, match="pointer of Git LFS") as caught:
        load_pretrained(sharded)
    assert caught.value.remedy.text == f"git -C {sharded} lfs pull"


def test_a_folder_of_adapters_alone_is_no_model(sharded: Path) -> None:
    for name in (*FILES, INDEX):
        (sharded / name).unlink()
    (sharded / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(UnsupportedError, match=r"adapter_model\.safetensors and no model"):
        load_pretrained(sharded)


def test_transformers_reads_the_same_file(sharded: Path) -> None:
    """Where a folder has one file and an index, both read the file."""
    transformers = pytest.importorskip("transformers")
    both: dict[str, torch.Tensor] = {}
    for file in FILES:
        both |= load_file(sharded / file)
    save_file({n: t + 1 for n, t in both.items()}, sharded / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(sharded)
    ours = load_pretrained(sharded)[1]("norm.weight", torch.Size([24]))
    assert torch.equal(theirs.model.norm.weight, ours)
    assert torch.equal(ours, both[NORM] + 1)

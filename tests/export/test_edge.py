"""Files for devices: each runtime computes what the fake-quantized model computes."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from test_gguf import MODELS
from tiny_gguf import model

from headrace.compress.quantized_model import faking, quantize_model
from headrace.compress.spec import PRESETS
from headrace.core.errors import UnsupportedError
from headrace.export import onnx_file
from headrace.export.cached import CachedDecoder, decoded
from headrace.export.edge_runtime import RUNTIMES

pytestmark = pytest.mark.slow
RUN = ("model.dim=32", "goal.steps=30", "data.sequence_length=32", "name=a")
NEEDS = {
    "onnx": ("onnxruntime", "onnx", "model.onnx", "int8"),
    "executorch": ("executorch", "executorch", "model.pte", "8da4w"),
}


@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma3"])
@pytest.mark.parametrize("preset", ["int8", "int4"])
def test_onnx_runtime_computes_the_codes(name: str, preset: str, tmp_path: Path) -> None:
    runtime = pytest.importorskip("onnxruntime", reason=onnx_file.INSTALL)
    pytest.importorskip("onnxscript", reason=onnx_file.INSTALL)
    ours, spec = model(MODELS[name][0]), PRESETS[preset]
    stored = quantize_model(ours, spec)
    ids = torch.randint(300, (21,), generator=torch.Generator().manual_seed(0)).tolist()
    with faking(ours, spec, stored):
        expected = decoded(CachedDecoder(ours, 300), ids).numpy()
    step = CachedDecoder(ours, 300, onnx_file.in_few_bits(ours, spec, stored))
    file = tmp_path / "model.onnx"
    assert onnx_file.write_onnx(step, file, {"told": "here"}) == [file]
    session = runtime.InferenceSession(file, providers=["CPUExecutionProvider"])
    assert session.get_modelmeta().custom_metadata_map["told"] == "here"
    names = [one.name for one in session.get_inputs()]
    shape = (2, ours.config.resolved_kv_heads, 0, ours.config.resolved_head_dim)
    past = [np.zeros(shape, np.float32) for _ in names[1:]]
    both = np.array([ids, ids])
    first, *past = session.run(None, dict(zip(names, [both[:, :8], *past], strict=True)))
    second, *past = session.run(None, dict(zip(names, [both[:, 8:9], *past], strict=True)))
    third, *past = session.run(None, dict(zip(names, [both[:, 9:], *past], strict=True)))
    logits = np.concatenate([first, second, third], axis=1)
    np.testing.assert_allclose(logits[1], expected, rtol=0, atol=1e-4)
    assert str(Path(onnx_file.__file__).parent) not in file.read_bytes().decode("latin-1")


@pytest.mark.parametrize("to", NEEDS)
def test_a_run_is_exported_and_its_file_writes_the_same_text(
    to: str, tmp_path: Path, plan_file: Path, run_cli: Any, zygote: Any
) -> None:
    package, _, name, preset = NEEDS[to]
    pytest.importorskip(package, reason=f"pip install 'headrace[{to}]'")
    train = ["--with", "quantization_aware_training"] if to == "executorch" else []
    assert run_cli(tmp_path, "train", str(plan_file), *RUN, *train, timeout_s=600).code == 0
    words = ["export", "a", "--to", to, "--json"]
    words += [] if train else ["--quantize", preset]
    told = zygote.run(tmp_path, *words)
    assert told.code == 0, told.err
    said = json.loads(told.out)
    assert said["preset"] == preset and said["equal"] > 0.8
    assert said["file"] == f"runs/a/{to}-{preset}/{name}"
    ask = ("--prompt", "w1 w2 w3", "--max-tokens", "8", "--json")
    if not train:
        assert said["drift"] < 1e-4
    theirs = json.loads(zygote.run(tmp_path, "run", said["file"], *ask).out)
    greedy = ("--temperature", "0", "--tokens", "8", *ask[:2], "--json")
    ours = json.loads(zygote.run(tmp_path, "sample", "a", *greedy).out)
    assert theirs["run"] == "runs/a" and theirs["distance"]["same_choice"] > 0.8
    assert theirs["text"] == ours["text"]
    file = tmp_path / said["file"]
    kept = file.read_bytes()
    file.write_bytes(kept[:-1] + bytes([kept[-1] ^ 1]))
    damaged = zygote.run(tmp_path, "run", said["file"], *ask)
    assert damaged.code == 2 and "not as it was written" in json.loads(damaged.out)["error"]
    record = json.loads((file.parent / "headrace.json").read_text())
    file.write_bytes(b"nothing")
    record["sha256"] = {name: hashlib.sha256(b"nothing").hexdigest()}
    (file.parent / "headrace.json").write_text(json.dumps(record))
    with pytest.raises(UnsupportedError, match="cannot load"):
        RUNTIMES[file.suffix](file, "", 1)

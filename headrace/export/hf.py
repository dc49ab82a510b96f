"""Write a folder that `transformers` opens: safetensors, config.json and the tokenizer.

The weights are converted file by file, so the host holds the model once and one file of it twice.
The folder is written under another name and renamed when it is complete: a reader sees all of it or
nothing.
"""

import json
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.errors import ConfigError, RunError, is_full_disk
from headrace.core.files import publish, shell
from headrace.core.model_config import ModelConfig
from headrace.data.tokenizer import Tokenizer
from headrace.model.adapter import WeightLink, check_ours
from headrace.model.companions import CONFIG, GENERATION, SPECIAL, TOKENIZER, Companions
from headrace.model.hf_config import config_to_hf, merged_config

SHARD_BYTES = 5_000_000_000
"""Most bytes of one file of weights; `save_pretrained` of transformers splits at this size too."""


def export_hf(
    model_state: Mapping[str, Tensor],
    config: ModelConfig,
    tokenizer_path: Path,
    out: Path,
    *,
    sequence_length: int,
    position: Mapping[str, Any] = MappingProxyType({}),
    companions: Companions = Companions(),  # noqa: B008  (it is frozen)
    dtype: torch.dtype = torch.float32,
    shard_bytes: int = SHARD_BYTES,
) -> None:
    """Write a model so that `from_pretrained(out)` of AutoModelForCausalLM and AutoTokenizer work.

    Args:
        model_state: every parameter by its name in Headrace, whole, on any device.
        config: the model, resolved as the run trained it.
        tokenizer_path: the path of its tokenizer.json.
        out: the new folder.
        sequence_length: tokens of a sequence in training; the longest text that the model promises.
        position: the model's `position.config_fields()`.
        companions: the small files that came with the weights that training began with.
        dtype: the type of the stored weights.
        shard_bytes: the most bytes of one file of weights.

    Raises:
        UnsupportedError: no architecture of transformers computes this model; names the keys.
        ConfigError: `out` has files already or cannot be written, or the state does not fit.
        RunError: the disk is full; nothing is left behind.
    """
    tokenizer = Tokenizer.load(tokenizer_path)
    end = tokenizer.document_token
    values = config_to_hf(config, sequence_length=sequence_length, end_id=end, position=position)
    values = merged_config(values, companions.tables.get(CONFIG, {}), position)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    files = _split(check_ours(config, model_state), dtype.itemsize, shard_bytes)
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise ConfigError(f"{out} exists already", f"--output {shell(_unused(out))}")
    document = tokenizer.decode([end])
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        aside = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
        try:
            _write_weights(aside, files, model_state, dtype)
            tokenizer.save(aside / "tokenizer.json")
            for name, text in companions.texts.items():
                (aside / name).parent.mkdir(exist_ok=True)
                (aside / name).write_text(text, encoding="utf-8")
            for name, table in _tables(values, companions, document, sequence_length).items():
                _write_json(aside / name, table)
            _publish(aside, out)
        finally:
            shutil.rmtree(aside, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        cause = error.strerror if isinstance(error, OSError) else ""
        problem = f"{out} could not be written: {cause or error}"
        if is_full_disk(error) or isinstance(error, SafetensorError):
            raise RunError(problem, "--output FOLDER on a disk with room for the weights") from None
        raise ConfigError(problem, "--output FOLDER that can be written") from None


def _tables(
    config: dict[str, Any], companions: Companions, document: str, sequence_length: int
) -> dict[str, dict[str, Any]]:
    """Return the JSON files beside weights and tokenizer.json, by name.

    Files that came with the first weights are kept where there are some; others are made.

    Args:
        config: the new config.json.
        companions: the small files that came with the first weights.
        document: the token that ends a document, as text.
        sequence_length: tokens of a sequence in training.
    """
    theirs = {
        name: {key: value for key, value in table.items() if key != "auto_map"}
        for name, table in companions.tables.items()
    }
    ids = {k: config[k] for k in ("bos_token_id", "eos_token_id", "pad_token_id") if k in config}
    # This class reads tokenizer.json unchanged; the class of a model family would change it.
    plain = {"tokenizer_class": "PreTrainedTokenizerFast"}
    tokenizer = {
        **plain,
        "bos_token": document,
        "eos_token": document,
        "model_max_length": sequence_length,
        "clean_up_tokenization_spaces": False,
    } | theirs.get(SPECIAL, {})
    if TOKENIZER in theirs:
        own_code = "auto_map" in companions.tables[TOKENIZER]
        tokenizer = theirs[TOKENIZER] | (plain if own_code else {})
        most = tokenizer.get("model_max_length")
        if isinstance(most, int | float) and most < sequence_length:
            tokenizer["model_max_length"] = sequence_length
    return {GENERATION: ids, **theirs, TOKENIZER: tokenizer, CONFIG: config}


def _split(links: list[WeightLink], item_bytes: int, shard_bytes: int) -> list[list[WeightLink]]:
    """Return the parameters of each file, in order.

    A file has at most `shard_bytes` bytes, unless it holds a single larger parameter.
    """
    files: list[list[WeightLink]] = [[]]
    size = 0
    for link in links:
        count = link.shape.numel() * item_bytes
        if files[-1] and size + count > shard_bytes:
            files.append([])
            size = 0
        files[-1].append(link)
        size += count
    return files


def _write_weights(
    folder: Path, files: list[list[WeightLink]], state: Mapping[str, Tensor], dtype: torch.dtype
) -> None:
    """Write model.safetensors, or numbered files and the index that transformers reads."""
    places: dict[str, str] = {}
    total_bytes = 0
    for number, links in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = name if len(files) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for link in links:
            tensors |= link.to_theirs(state[link.ours].detach().to("cpu", dtype))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        _write_json(folder / "model.safetensors.index.json", index)


def _write_json(path: Path, values: dict[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")


def _publish(aside: Path, out: Path) -> None:
    """Flush the folder `aside` to the disk and rename it to `out`."""
    aside.chmod(0o755)
    publish(aside, out)


def _unused(out: Path) -> Path:
    """Return the first unused name beside `out`, as NAME-2."""
    number = 2
    while (candidate := out.with_name(f"{out.name or 'hf'}-{number}")).exists():
        number += 1
    return candidate

"""Write a folder that `transformers` opens: safetensors, config.json and the tokenizer.

The weights are converted file by file, so the host holds the model once and one file of it twice.
"""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.data.tokenizer import Tokenizer
from headrace.export.folder import new_folder, write_json
from headrace.model.adapter import WeightLink, check_ours
from headrace.model.companions import CONFIG, GENERATION, SPECIAL, TOKENIZER, Companions
from headrace.model.hf_config import architecture, config_to_hf, merged_config

SHARD_BYTES = 5_000_000_000
"""Most bytes of one file of weights; `save_pretrained` of transformers splits at this size too."""


class CodesOfFolder(Protocol):
    """Say which weights of a folder are stored in codes."""

    def tensors(self, link: WeightLink) -> dict[str, Tensor] | None:
        """Return what the files hold of a weight by their names; None of what is whole."""
        ...

    def config(self, links: list[WeightLink]) -> dict[str, Any]:
        """Return the table `quantization_config` of config.json."""
        ...


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
    packed: CodesOfFolder | None = None,
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
        packed: says which weights are stored in codes; none are without it.

    Raises:
        UnsupportedError: no architecture of transformers computes this model; names the keys.
        ConfigError: `out` has files already or cannot be written, or the state does not fit.
        RunError: the disk is full; nothing is left behind.
    """
    tokenizer = Tokenizer.load(tokenizer_path)
    end = tokenizer.document_token
    named = companions.tables.get(CONFIG, {}).get("architectures") or [""]
    kind = architecture(config, named[0])
    values = config_to_hf(
        config, sequence_length=sequence_length, end_id=end, position=position, prefer=kind.name
    )
    values = merged_config(values, companions.tables.get(CONFIG, {}), position)
    values["torch_dtype"] = str(dtype).removeprefix("torch.")
    links = check_ours(config, model_state, kind)
    if packed is not None:
        values["quantization_config"] = packed.config(links)
    files = _split(links, dtype.itemsize, shard_bytes)
    document = tokenizer.decode([end])
    with new_folder(out) as aside:
        _write_weights(aside, files, model_state, dtype, packed)
        tokenizer.save(aside / "tokenizer.json")
        for name, text in companions.texts.items():
            (aside / name).parent.mkdir(exist_ok=True)
            (aside / name).write_text(text, encoding="utf-8")
        for name, table in _tables(values, companions, document, sequence_length).items():
            write_json(aside / name, table)


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
    folder: Path,
    files: list[list[WeightLink]],
    state: Mapping[str, Tensor],
    dtype: torch.dtype,
    packed: CodesOfFolder | None,
) -> None:
    """Write model.safetensors, or numbered files and the index that transformers reads."""
    places: dict[str, str] = {}
    total_bytes = 0
    for number, links in enumerate(files, start=1):
        name = f"model-{number:05d}-of-{len(files):05d}.safetensors"
        name = name if len(files) > 1 else "model.safetensors"
        tensors: dict[str, Tensor] = {}
        for link in links:
            if packed is not None and (codes := packed.tensors(link)) is not None:
                tensors |= {key: part.cpu().contiguous() for key, part in codes.items()}
                continue
            value = state[link.ours].detach()
            value = value.float() - link.offset if link.offset else value
            tensors |= link.to_theirs(value.to("cpu", dtype))
        save_file(tensors, folder / name, metadata={"format": "pt"})
        places |= dict.fromkeys(tensors, name)
        total_bytes += sum(tensor.nbytes for tensor in tensors.values())
    if len(files) > 1:
        index = {"metadata": {"total_size": total_bytes}, "weight_map": places}
        write_json(folder / "model.safetensors.index.json", index)

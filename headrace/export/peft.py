"""Write the adapters of a run in PEFT's format, which `peft` opens beside the run's base.

An adapter of a fused linear becomes one for each projection in it: they share the first matrix, and
each has its rows of the second. So the numbers are the run's, bit for bit, and `model.adapter`
reads the same adapters back.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.files import shell, write_whole
from headrace.export.folder import new_folder, write_json
from headrace.model.adapter import links, read_architecture, weights_digest
from headrace.model.companions import TEMPLATE
from headrace.model.hf_config import architecture
from headrace.model.hf_families import Architecture
from headrace.model.lora import DoraLinear, LoraLinear
from headrace.model.peft import BASE, CONFIG, HEAD, PREFIX, WEIGHTS


def export_peft(build: Build, out: Path, *, run: Path, template: str = "") -> None:
    """Write a run's adapters into the new folder `out`.

    Args:
        build: the run, opened with its trained weights.
        out: the folder to write, which must be absent or empty.
        run: the run's folder, which error messages name.
        template: the chat template that the adapters were trained with; "" for none.

    Raises:
        ConfigError, RunError: the run trained no adapters; or see `new_folder`.
        UnsupportedError: no architecture of transformers is this model.
    """
    trains = [t for t in build.techniques if isinstance(t, AdapterTechnique)]
    if not trains:
        raise ConfigError(
            f"{run} trained no adapters, and PEFT's format holds adapters alone",
            f"headrace export {shell(run)} --to hf",
        )
    tensors, modules = _tensors(build)
    tables, saved = _tables(trains[0], build)
    base = build.config.pretrained
    table = _table(trains[0], build, modules, saved)
    header = {"format": "pt", BASE: weights_digest(Path(base))} if base else {"format": "pt"}
    with new_folder(out) as aside:
        save_file({**tensors, **tables}, aside / WEIGHTS, metadata=header)
        write_json(aside / CONFIG, table)
        if template:
            write_whole(aside / TEMPLATE, template)


def _tensors(build: Build) -> tuple[dict[str, Tensor], dict[str, int]]:
    """Return the tensors by PEFT's names, and each adapted module's rank by its name in a block."""
    kind = _architecture(build)
    tensors: dict[str, Tensor] = {}
    modules: dict[str, int] = {}
    for link in links(build.config, kind):
        name = link.ours.removesuffix(".weight")
        linear = build.model.get_submodule(name) if link.ours.endswith(".weight") else None
        if not isinstance(linear, LoraLinear):
            continue
        rows = replace(link, transposed=False)
        a, b = (x.detach().float().cpu() for x in (linear.lora_a, linear.lora_b))
        lengths = linear.lora_m.detach().float().cpu() if isinstance(linear, DoraLinear) else None
        scaled = rows.to_theirs(b)
        of_rows = {} if lengths is None else rows.to_theirs(lengths)
        for theirs, part in scaled.items():
            module = theirs.removesuffix(".weight")
            tensors[f"{PREFIX}{module}.lora_A.weight"] = a.clone()
            tensors[f"{PREFIX}{module}.lora_B.weight"] = part.clone()
            if theirs in of_rows:
                tensors[f"{PREFIX}{module}.lora_magnitude_vector"] = of_rows[theirs].clone()
        for module in kind.modules[name.split(".", 2)[2]]:
            modules[module] = a.size(0)
    return tensors, modules


def _tables(technique: AdapterTechnique, build: Build) -> tuple[dict[str, Tensor], list[str]]:
    """Return what learned whole by PEFT's names, and the names of these modules.

    A table that embedding and head share is written for both, so that they are alike in every
    version of PEFT, which gives each a copy.
    """
    kind, learned = _architecture(build), technique.tables(build.config)
    tensors: dict[str, Tensor] = {}
    for link in links(build.config, kind):
        if link.ours in learned:
            value = build.model.get_parameter(link.ours).detach().float().cpu()
            tensors |= link.to_theirs(value)
    if tensors and build.config.tied_embeddings:
        (table,) = tensors.values()
        tensors[HEAD] = table.clone()
    names = [name.removesuffix(".weight").rpartition(".")[2] for name in tensors]
    return {f"{PREFIX}{name}": tensor.clone() for name, tensor in tensors.items()}, names


def _table(
    technique: AdapterTechnique, build: Build, modules: Mapping[str, int], saved: list[str]
) -> dict[str, Any]:
    """Return adapter_config.json."""
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": build.config.pretrained or None,
        "r": technique.rank,
        "lora_alpha": technique.alpha,
        "target_modules": list(modules),
        "rank_pattern": {m: rank for m, rank in modules.items() if rank != technique.rank},
        "alpha_pattern": {},
        "lora_dropout": technique.dropout,
        "use_rslora": technique.scaling == "root_of_rank",
        "use_dora": technique.magnitudes,
        "fan_in_fan_out": _architecture(build).conv1d,
        "bias": "none",
        "modules_to_save": saved or None,
        "init_lora_weights": True,
        "inference_mode": True,
    }


def _architecture(build: Build) -> Architecture:
    """Return the class of the run's base, or the first that computes the same."""
    base = build.config.pretrained
    return read_architecture(Path(base)) if base else architecture(build.config)


def stored_in(build: Build) -> str:
    """Return how the weights beside a run's adapters were stored in few bits, or ""."""
    return next((t.stored for t in build.techniques if isinstance(t, AdapterTechnique)), "")

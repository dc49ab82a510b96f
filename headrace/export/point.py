"""Write a quantized model into a folder, and open it again: the very codes that are evaluated.

A folder has the weights (`model.safetensors`: a matrix's codes, scales and zero points under its
name, four-bit codes two a byte; of a pruned matrix the numbers that are left and a bit a number;
whole weights in fp32), `quantization.json` (the spec, and what the
files are), `plan.toml` (the model, and the text that it is evaluated on) and `tokenizer.json`.
"""

from collections.abc import Collection, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace import __version__
from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.assemble.sockets import Build
from headrace.compress.codes import Codes, pack_int4, unpack_int4
from headrace.compress.quantized_model import Stored, StoredMatrix, computing
from headrace.compress.sparsity import SparseMatrix
from headrace.compress.spec import QuantizationSpec
from headrace.core.errors import ConfigError
from headrace.core.files import parse_object, read_plan_text, sha256_of, shell, write_whole
from headrace.core.folders import POINT_RECORD as RECORD
from headrace.core.strict import read_table
from headrace.data.ingest import reopen
from headrace.data.prepared import Prepared
from headrace.data.tokenizer import Tokenizer
from headrace.export.folder import write_json
from headrace.inference.load import shapes_model
from headrace.kernels.quantized_weight import NF4, NF4Weight
from headrace.optim.roles import role_of
from headrace.parallel.world import World
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Stage
from headrace.train.run_folder import RunFolder

FAKE_QUANTIZED = "fake_quantized"
"""The socket of techniques that train what is quantized later."""
WEIGHTS = "model.safetensors"
FORMAT_VERSION = 1


def point_plan(build: Build) -> Plan:
    """Return the plan of a model alone: its resolved shape, not adapted nor rounded, in fp32."""
    alone = {"pretrained": "", "adapter": "", "precision": "fp32"}
    kept = {
        name: one
        for name, one in build.plan.techniques.items()
        if shapes_model(one, with_data=True)
        and not isinstance(one, AdapterTechnique)
        and FAKE_QUANTIZED not in one.composes
    }
    return build.plan.replaced(
        model={**build.config.model_dump(), **alone}, techniques=kept, mesh=MeshConfig()
    )


def trained_spec(plan: Plan) -> QuantizationSpec | None:
    """Return the spec whose rounding a plan trains with; None where it trains with none."""
    specs = [
        getattr(one, "spec", None)
        for one in plan.techniques.values()
        if FAKE_QUANTIZED in one.composes
    ]
    return specs[0] if specs else None


def write_point(
    folder: Path, build: Build, spec: QuantizationSpec, stored: Stored, source: str
) -> None:
    """Write a quantized model into an empty folder.

    Args:
        folder: where it goes.
        build: the model with its fp32 weights, made of `point_plan`.
        spec: how its matrices are quantized.
        stored: the quantized matrices.
        source: the digest of the weights that these were made of.
    """
    folder.mkdir(parents=True, exist_ok=True)
    tensors: dict[str, Tensor] = {}
    for name, parameter in build.model.named_parameters():
        if name in stored:
            kind = spec.format_of(name, role_of(name, 2))
            parts = _parts(stored[name], four=kind.dtype == "int4", half=kind.scales == "bf16")
            tensors |= {f"{name}.{part}": value for part, value in parts.items()}
        else:
            tensors[name] = parameter.detach().float()
    tensors = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    shapes = {name: [*build.model.get_parameter(name).shape] for name in stored}
    build.prepared.tokenizer.save(folder / "tokenizer.json")
    write_whole(folder / "plan.toml", build.plan.to_toml())
    write_json(folder / "data.json", build.prepared.record())
    record = {
        "format": FORMAT_VERSION,
        "spec": spec.model_dump(mode="json", exclude_none=True),
        "shapes": shapes,
        "sha256": sha256_of(folder / WEIGHTS),
        "source": source,
        "tokenizer": build.prepared.tokenizer.fingerprint,
        "headrace": __version__,
    }
    write_json(folder / RECORD, record)


def read_point(
    folder: Path, device: torch.device | None = None
) -> tuple[QuantizationSpec, dict[str, StoredMatrix], dict[str, Tensor]]:
    """Return the spec of a quantized model, its quantized matrices, and its whole weights.

    Args:
        folder: as `write_point` left it.
        device: where the tensors go; the host's memory without it.

    Raises:
        ConfigError: a file is damaged, or a later version wrote it.
    """
    record = _record(folder)
    spec = read_table(QuantizationSpec, record["spec"], "spec")
    tensors = load_file(folder / WEIGHTS, device=str(device or "cpu"))
    stored = {name: _stored(tensors, name, shape, spec) for name, shape in record["shapes"].items()}
    return spec, stored, tensors


def is_pruned_point(folder: Path) -> bool:
    """Return whether a point has weights left out and none in fewer bits, so that it can be whole.

    Raises:
        ConfigError: a file is damaged, or a later version wrote it.
    """
    spec = read_table(QuantizationSpec, _record(folder)["spec"], "spec")
    formats = (spec.matrices, spec.embeddings, spec.head, *spec.exceptions.values())
    return all(kind.dtype == "fp32" for kind in formats)


def open_point(folder: Path, catalogue: Catalogue, *, with_data: bool = False) -> Build:
    """Return the quantized model of a folder; it computes by torchao on this machine's device.

    Args:
        folder: as `write_point` left it.
        catalogue: the techniques and model families.
        with_data: whether to open the validation text too.

    Raises:
        ConfigError: a file is damaged or of another model than plan.toml, or the text is gone.
        UnsupportedError: torchao is not installed.
    """
    build, spec, stored = closed_point(folder, catalogue, with_data=with_data, device="auto")
    stack = ExitStack()  # it stays in the model as long as the build lives
    stack.enter_context(computing(build.model, spec, stored))
    build.notes.setdefault("standing", []).append(stack)
    return build


def closed_point(
    folder: Path, catalogue: Catalogue, *, with_data: bool = False, device: str = "cpu"
) -> tuple[Build, QuantizationSpec, dict[str, StoredMatrix]]:
    """Return the model of a folder with its whole weights, its spec, and its quantized matrices.

    The parameters that are quantized have no values.

    Args:
        folder: as `write_point` left it.
        catalogue: the techniques and model families.
        with_data: whether to open the validation text too.
        device: where it goes, as a plan names it.

    Raises:
        ConfigError: a file is damaged or of another model than plan.toml, or the text is gone.
    """
    text = read_plan_text(folder / "plan.toml")
    plan = Plan.read(text, catalogue).replaced(device=device)
    where = choose_device(plan)
    spec, stored, whole = read_point(folder, where)
    tokenizer = Tokenizer.load(folder / "tokenizer.json")
    if tokenizer.fingerprint != _record(folder)["tokenizer"]:
        raise ConfigError(
            f"{folder / 'tokenizer.json'} is not the tokenizer of this model "
            f"(sha256 {tokenizer.fingerprint[:12]})",
            _remade(folder),
        )
    if with_data:
        prepared = reopen(plan, RunFolder(folder).read_data(), folder)
    else:
        none: Any = None  # a model alone reads no text
        prepared = Prepared(folder, tokenizer, (), none, fingerprint={}, has_begun=True)
    until = Stage.STEP if with_data else Stage.MATERIALIZE
    build = make_build(plan, prepared, World(), where, until=until)
    _check_stored(folder, build, stored)
    fill_(build, whole, stored, source=folder, remedy=_remade(folder))
    return build, spec, stored


@torch.no_grad()
def pruned_build(folder: Path, catalogue: Catalogue) -> Build:
    """Return the model of a pruned point on the host, whole, with zeros.

    Args:
        folder: as `write_point` left it.
        catalogue: the techniques and model families.

    Raises:
        ConfigError: see `closed_point`.
    """
    build, _, stored = closed_point(folder, catalogue)
    for name, one in stored.items():
        assert isinstance(one, SparseMatrix), "a pruned point has weights in no other form"
        build.model.get_parameter(name).copy_(one.dequantize())
    return build


@torch.no_grad()
def fill_(
    build: Build,
    state: Mapping[str, Tensor],
    but: Collection[str] = (),
    *,
    source: Path | str,
    remedy: str,
) -> None:
    """Copy the values of all parameters into a model.

    Args:
        build: the model.
        state: the values, by the parameters' names.
        but: names of the parameters that are filled in another way.
        source: where the values are from, for the message.
        remedy: what to do where one is missing.

    Raises:
        ConfigError: a parameter has no value, or one of another shape.
    """
    for name, parameter in build.model.named_parameters():
        if name in but:
            continue
        if name not in state or state[name].shape != parameter.shape:
            has = f"with shape {[*state[name].shape]}" if name in state else "not"
            raise ConfigError(
                f"this model has {name} with shape {[*parameter.shape]}, and {source} has it {has}",
                remedy,
            )
        parameter.copy_(state[name])


def _check_stored(folder: Path, build: Build, stored: Stored) -> None:
    """Refuse quantized matrices that the model of plan.toml does not have.

    Raises:
        ConfigError: names the first of them.
    """
    shapes = {name: parameter.shape for name, parameter in build.model.named_parameters()}
    for name, one in stored.items():
        shape = one.codes_RC.shape if isinstance(one, Codes) else one.shape
        if shapes.get(name) != shape:
            has = f"with shape {[*shapes[name]]}" if name in shapes else "not"
            raise ConfigError(
                f"{folder} has {name} with shape {[*shape]}, and the model of its plan.toml has it "
                f"{has}",
                _remade(folder),
            )


def _record(folder: Path) -> dict[str, Any]:
    """Return quantization.json, checked against the weights beside it."""
    try:
        record = parse_object((folder / RECORD).read_bytes())
        version, digest = record["format"], record["sha256"]
        if version != FORMAT_VERSION:
            raise ValueError(f"has format {version}, and this version reads {FORMAT_VERSION}")
        if digest != sha256_of(folder / WEIGHTS):
            raise ValueError(f"has another sha256 than the {WEIGHTS} beside it")
    except (OSError, ValueError, KeyError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        raise ConfigError(f"{folder / RECORD} is damaged: it {what}", _remade(folder)) from None
    return record


def _remade(folder: Path) -> str:
    """Return the command that makes the quantized model anew."""
    preset = folder.name.removesuffix("-hybrid")
    return f"headrace compress MODEL --to {preset} --output {shell(f'{folder}-2')}"


def _parts(one: StoredMatrix, *, four: bool, half: bool) -> dict[str, Tensor]:
    """Return what a file keeps of a quantized matrix."""
    if isinstance(one, NF4Weight):
        return {part: getattr(one, part) for part in one.by_row}
    if isinstance(one, SparseMatrix):
        return {"values": one.values_N, "bits": one.bits}
    parts = {
        "codes": pack_int4(one.codes_RC) if four else one.codes_RC,
        "scales": one.scales_RG.bfloat16() if half else one.scales_RG,
    }
    return {**parts, "zeros": one.zeros_RG} if bool(one.zeros_RG.any()) else parts


def _stored(
    tensors: dict[str, Tensor], name: str, shape: list[int], spec: QuantizationSpec
) -> StoredMatrix:
    """Return a quantized matrix, and take its parts out of the tensors of a file."""
    prefix = f"{name}."
    parts = {
        key.removeprefix(prefix): tensors.pop(key)
        for key in [key for key in tensors if key.startswith(prefix)]
    }
    kind = spec.format_of(name, role_of(name, 2))
    if kind.sparsity is not None:
        return SparseMatrix(parts["values"], parts["bits"], shape[1])
    if kind.dtype == "nf4":
        inner = {**parts, "levels": torch.tensor(NF4, device=parts["codes"].device)}
        return NF4Weight(inner, torch.Size(shape), torch.float32)
    codes = parts["codes"]
    if kind.dtype == "int4":
        codes = unpack_int4(codes, shape[1])
    scales = parts["scales"].float()
    return Codes(codes, scales, parts.get("zeros", torch.zeros_like(scales, dtype=torch.int8)))

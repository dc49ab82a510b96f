"""Map our parameters to the tensors of Hugging Face `transformers` and back, by name and layout.

Our fused matrices are taken apart by `fusion.py`; GPT-2 stacks its own q, k and v and stores
matrices as [in, out] (Conv1D). Every map only moves numbers, so a round trip is exact bit for bit,
and it maps gradients as well as weights. RMSNorm, QK-norm (before the rotation) and RoPE (halves)
mean the same on both sides.

A folder of weights is checked from its files' headers before a tensor is read; then each tensor is
read when the model asks for it. Nothing but safetensors and JSON is opened: .bin and .pt files are
pickles, and a pickle can run code.
"""

import hashlib
import json
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.core.errors import ConfigError, UnsupportedError, interpreting
from headrace.core.files import has_file, python, sha256_of
from headrace.core.folders import refetch_command, refuse_absent, refuse_no_model
from headrace.core.model_config import ModelConfig
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.fusion import Fusion, fusions
from headrace.model.hf_config import PUBLISHED, architecture, config_from_hf, named_architecture
from headrace.model.hf_families import GPT2, Architecture
from headrace.model.init import Source
from headrace.model.mask import MaskSpec
from headrace.model.rms_conversion import as_asked

_PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_OTHERS = (".safetensors", *_PICKLES, ".gguf", ".h5", ".msgpack", ".onnx", ".index.json")
"""Ends of names of files that hold weights of some kind, or say where they lie."""
_INDEX, _ADAPTERS = "model.safetensors.index.json", "adapter_model.safetensors"
_LFS = b"version https://git-lfs"
_FLOATS = ("F64", "F32", "F16", "BF16")
_BUFFERS = re.compile(r"\.attn\.(masked_)?bias$|\.rotary_emb\.inv_freq$")
"""Constants that older files store beside the weights."""


@dataclass(frozen=True)
class WeightLink:
    """One of our parameters and the tensors that it is on the other side."""

    ours: str
    theirs: tuple[str, ...]
    shape: torch.Size
    fusion: Fusion | None
    transposed: bool
    offset: float = 0.0
    """what their norm adds to its weight"""

    def to_ours(self, tensors: Sequence[Tensor]) -> Tensor:
        """Return our parameter from their tensors, given in the order of `theirs`.

        Gradients go through it too: it moves numbers, and adds no offset.
        """
        rows = [t.t() if self.transposed else t for t in tensors]
        if self.fusion is None:
            return rows[0]
        sizes = [self.fusion.groups * part for part in self.fusion.split]
        return self.fusion.fuse(torch.cat(rows).split(sizes))

    def to_theirs(self, tensor: Tensor) -> dict[str, Tensor]:
        """Return our parameter as their tensors by name, contiguous."""
        pieces = self.fusion.pieces(tensor) if self.fusion else (tensor,)
        if len(self.theirs) == 1:
            pieces = (torch.cat(pieces),)
        pieces = [(p.t() if self.transposed else p).contiguous() for p in pieces]
        return dict(zip(self.theirs, pieces, strict=True))


def links(config: ModelConfig, kind: Architecture | None = None) -> list[WeightLink]:
    """Return the link of every parameter of a decoder of this config, in parameter order.

    Args:
        config: the model.
        kind: the class of the other side; without it the first that matches.

    Raises:
        UnsupportedError: no architecture of transformers matches.
    """
    kind, fused = kind or architecture(config), fusions(config)
    with torch.device("meta"):
        parameters = dict(Decoder(config, baseline_parts(config), MaskSpec()).named_parameters())
    made = []
    for name, parameter in parameters.items():
        module, _, leaf = name.rpartition(".")
        prefix = ""
        if module.startswith("blocks."):
            _, layer, module = module.split(".", 2)
            prefix = kind.block.format(layer)
        theirs = tuple(f"{prefix}{part}.{leaf}" for part in kind.modules[module])
        transposed = kind.conv1d and bool(prefix) and parameter.dim() == 2
        offset = kind.norm_offset if module.endswith("norm") else 0.0
        fusion = fused.get(module)
        made.append(WeightLink(name, theirs, parameter.shape, fusion, transposed, offset))
    return made


def from_hf(
    config: ModelConfig,
    shapes: Mapping[str, Sequence[int]],
    read: Callable[[str], Tensor],
    path: Path | None = None,
    kind: Architecture | None = None,
) -> dict[str, Callable[[], Tensor]]:
    """Check their state dict now; return a function for each of our tensors that makes it.

    Args:
        config: the model.
        shapes: their tensors' shapes by stored name.
        read: gives one of their tensors by stored name.
        path: the folder that they lie in, where they lie in one.
        kind: the class that they are of; without it the first that matches.

    Raises:
        ConfigError: a tensor is missing, unexpected, or has another shape.
        UnsupportedError: no architecture of transformers matches `config`.
    """
    kind = kind or architecture(config)
    every = links(config, kind)
    stored = _canonical(kind, shapes)
    if config.tied_embeddings and (copy := stored.pop("lm_head.weight", None)) is not None:
        embed = stored.get(f"{kind.modules['embed'][0]}.weight", copy)
        if not torch.equal(read(copy), read(embed)):
            raise ConfigError(
                f"config.json says that embeddings are tied, but {copy} differs from {embed}",
                f'"tie_word_embeddings": false in {(path or Path()) / "config.json"}',
            )
    expected: dict[str, tuple[int, ...]] = {}
    for link in every:
        theirs = link.to_theirs(torch.empty(link.shape, device="meta"))
        expected |= {name: tuple(tensor.shape) for name, tensor in theirs.items()}
    given = {name: tuple(shapes[at]) for name, at in stored.items()}
    remedy = refetch_command(path) if path is not None else ""
    _compare(expected, given, kind.name, remedy)

    def maker(link: WeightLink) -> Callable[[], Tensor]:
        def make() -> Tensor:
            moved = link.to_ours([read(stored[name]) for name in link.theirs])
            return moved.float() + link.offset if link.offset else moved

        return make

    return {link.ours: maker(link) for link in every}


def check_ours(
    config: ModelConfig, tensors: Mapping[str, Tensor], kind: Architecture | None = None
) -> list[WeightLink]:
    """Check that `tensors` are exactly the parameters of `config`, and return its links to `kind`.

    Raises:
        ConfigError: a tensor is missing, unexpected, or has another shape.
        UnsupportedError: no architecture of transformers matches `config`.
    """
    every = links(config, kind)
    expected = {link.ours: tuple(link.shape) for link in every}
    _compare(expected, {name: tuple(t.shape) for name, t in tensors.items()}, "the model's state")
    return every


def _canonical(kind: Architecture, names: Iterable[str]) -> dict[str, str]:
    """Return stored names of all weights by full name; GPT-2's own files leave out a prefix."""
    kept = [name for name in names if not _BUFFERS.search(name)]
    bare = kind is GPT2 and not any(name.startswith("transformer.") for name in kept)
    return {
        f"transformer.{name}" if bare and not name.startswith("lm_head.") else name: name
        for name in kept
    }


def _compare(
    expected: Mapping[str, tuple[int, ...]],
    given: Mapping[str, tuple[int, ...]],
    owner: str,
    remedy: str = "",
) -> None:
    """Raise a ConfigError that lists what differs between two sets of names and shapes."""
    missing = [name for name in expected if name not in given]
    surplus = [name for name in given if name not in expected]
    reshaped = [
        f"{name} is {list(given[name])}, expected {list(shape)}"
        for name, shape in expected.items()
        if given.get(name, shape) != shape
    ]
    differences = (("missing", missing), ("unexpected", surplus), ("of another shape", reshaped))
    lines = [f"{len(names)} {what}: {_some(names)}" for what, names in differences if names]
    if lines:
        raise ConfigError(
            f"the tensors do not fit {owner}: " + "; ".join(lines),
            remedy or "tensors and a config that belong together",
        )


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return ", ".join(names[:3]) + more


def read_config(path: Path, key: str = "model.pretrained") -> ModelConfig:
    """Return the model that a folder describes; its weights are not looked at.

    Args:
        path: the folder.
        key: the plan's key that names it.

    Raises:
        ConfigError: there is no such folder, or its config.json is damaged.
        UnsupportedError: a model that we do not compute exactly.
    """
    refuse_absent(path, key)
    refuse_no_model(path, key)
    return config_from_hf(read_json(path / "config.json"), key)


def read_architecture(path: Path, key: str = "model.pretrained") -> Architecture:
    """Return the class that a folder's config.json names.

    Raises:
        ConfigError, UnsupportedError: it is damaged, or names none that is read.
    """
    return named_architecture(read_json(path / "config.json"), key)


def longest_row(path: Path) -> int:
    """Return the tokens of a row that a folder's model was made for; 0 where it does not say."""
    values = read_json(path / "config.json")
    with interpreting(path / "config.json", PUBLISHED):
        return int(values.get("max_position_embeddings") or values.get("n_positions") or 0)


_SHAPE = {"vocab", "dim", "layers", "heads", "kv_heads", "head_dim", "ffn"}
"""Keys that every plan of a run that has begun says."""


def shape_of(model: ModelConfig) -> ModelConfig:
    """Return the model as the weights that it starts from have it.

    The plan of a run that has begun says it itself, whatever became of the folder since.

    Raises:
        ConfigError, UnsupportedError: see `read_config`.
    """
    known = not model.pretrained or model.model_fields_set >= _SHAPE
    return model if known else as_asked(model, read_config(Path(model.pretrained)))


def load_pretrained(path: Path, key: str = "model.pretrained") -> tuple[ModelConfig, Source]:
    """Return the model in a folder, and a source of its weights by our names.

    The source gives fp32 tensors on the host, whatever the files hold.

    Args:
        path: the folder.
        key: the plan's key that names it.

    Raises:
        ConfigError: a file is missing or damaged, tensors do not fit config.json, or hold NaN.
        UnsupportedError: pickled or quantised weights, or a model that we do not compute exactly.
    """
    config = read_config(path, key)
    shapes, read = _open_tensors(path, *_weight_files(path), key)
    makers = from_hf(config, shapes, read, path, read_architecture(path, key))

    def source(name: str, shape: torch.Size) -> Tensor:
        assert name in makers, f"{name} is not in {path}: what adds it must refuse given weights"
        tensor = makers[name]()
        assert tensor.shape == shape, f"{name} is {list(tensor.shape)} in {path}, not {list(shape)}"
        if wrong := int((~torch.isfinite(tensor)).sum()):
            raise ConfigError(
                f"{name} in {path} holds {wrong:,} numbers of {tensor.numel():,} that are NaN or "
                "infinite: no learning rate mends given weights",
                f"{refetch_command(path)}; or {key}=FOLDER of others",
            )
        return tensor.float()

    return config, source


def read_json(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file of a model's folder.

    Raises:
        ConfigError: it cannot be read, or holds none.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}", refetch_command(path.parent)
        ) from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path} is not JSON: {error}", refetch_command(path.parent)) from None
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds no JSON object", refetch_command(path.parent))
    return values


def weights_digest(path: Path) -> str:
    """Return the sha256 of a folder's config and weights, file by file.

    Every byte is read, at 1 to 2 GB/s where the system holds the files already.

    Raises:
        ConfigError, UnsupportedError: it holds no weights that can be read.
    """
    digest = hashlib.sha256(json.dumps(read_json(path / "config.json"), sort_keys=True).encode())
    for file in _weight_files(path)[0]:
        digest.update(bytes.fromhex(sha256_of(file)))
    return digest.hexdigest()


def stored_weights(path: Path) -> Iterator[tuple[str, Tensor]]:
    """Read the tensors of a folder of weights one by one, as they are stored, with their names.

    Raises:
        ConfigError, UnsupportedError: it holds no weights that can be read.
    """
    shapes, read = _open_tensors(path, *_weight_files(path))
    return ((name, read(name)) for name in shapes)


def files_left_out(path: Path) -> str:
    """Return a line about the files of a folder that hold weights too and are not read, or "".

    Raises:
        ConfigError, UnsupportedError: it holds no weights that can be read.
    """
    files, placed = _weight_files(path)
    read = {file.name for file in files} | ({_INDEX} if placed else set())
    beside = [file.name for file in path.iterdir() if file.name.endswith(_OTHERS)]
    left_out = sorted({*beside} - read)
    if not left_out:
        return ""
    as_others = ", as transformers chooses," if placed or files[0].stem == "model" else ""
    adapters = f"; the adapters of {_ADAPTERS} are not applied" * (_ADAPTERS in left_out)
    return (
        f"{path}: the weights are read from {_some(sorted(read))}{as_others} and not from "
        f"{_some(left_out)}{adapters}"
    )


def _weight_files(path: Path) -> tuple[list[Path], dict[str, str] | None]:
    """Return the files that `transformers` reads: one file, else those of the index, and the index.

    Without both every safetensors file is read but adapters.
    """
    placed = None
    if (path / "model.safetensors").is_file():
        names = ["model.safetensors"]
    elif (path / _INDEX).is_file():
        placed = _read_index(path / _INDEX)
        names = sorted({*placed.values()} | _numbered_alike(path, placed))
    else:
        names = sorted(file.name for file in path.glob("*.safetensors") if file.name != _ADAPTERS)
    if names:
        return [path / name for name in names], placed
    if (path / _ADAPTERS).is_file():
        raise UnsupportedError(
            f"{path} has {_ADAPTERS} and no model: adapters stand on the weights of another folder",
            _by_transformers(
                "from peft import AutoPeftModelForCausalLM as M; "
                f"M.from_pretrained({str(path)!r}).merge_and_unload()",
                path,
            ),
        )
    pickles = sorted(file.name for file in path.iterdir() if file.suffix in _PICKLES)
    if pickles:
        raise UnsupportedError(
            f"{path} has {pickles[0]} and no safetensors; that file is a pickle, which can run "
            "code when it is opened, so Headrace never opens one",
            _by_transformers(
                "from transformers import AutoModelForCausalLM as M; "
                f"M.from_pretrained({str(path)!r})",
                path,
            )
            + f", where you trust the file; or {refetch_command(path)}",
        )
    raise ConfigError(f"{path} has no *.safetensors", refetch_command(path))


def _by_transformers(load: str, path: Path) -> str:
    """Return the command that loads a model and saves its safetensors into its own folder."""
    return python(f"{load}.save_pretrained({str(path)!r})")


def _read_index(index: Path) -> dict[str, str]:
    """Return the file of each tensor by an index; every file is there, beside it."""
    placed = read_json(index).get("weight_map")
    aside = _without_index(index)
    if not isinstance(placed, dict) or not placed:
        raise ConfigError(f"{index} has no weight_map of names to files", aside)
    for tensor, name in placed.items():
        if not isinstance(name, str) or Path(name).name != name:
            raise ConfigError(
                f"{index} names {name} for {tensor}, which is not a file beside it", aside
            )
        if not has_file(index.parent, name):
            raise ConfigError(
                f"{index} names {name}, which is not there", refetch_command(index.parent)
            )
    return placed


def _without_index(index: Path) -> str:
    """Return what to do about an index that is wrong: fetch it again, or read all files."""
    moved = f"mv {shlex.quote(str(index))} {shlex.quote(f'{index}.wrong')}"
    return f"{moved}, if its files are whole; or {refetch_command(index.parent)}"


def _numbered_alike(path: Path, placed: Mapping[str, str]) -> set[str]:
    """Return the files of a folder that are numbered as those of an index, as in -00002-of-00009.

    One that the index does not name has tensors that it leaves out.
    """
    numbered = re.compile(r"(.*-)\d+(-of-\d+\.safetensors)")
    sets = {match.groups() for name in placed.values() if (match := numbered.fullmatch(name))}
    matches = ((file.name, numbered.fullmatch(file.name)) for file in path.glob("*.safetensors"))
    return {name for name, match in matches if match and match.groups() in sets}


def _check_index(path: Path, placed: Mapping[str, str], holder: Mapping[str, str]) -> None:
    """Refuse an index that says otherwise than the files which it is about.

    Args:
        path: the folder.
        placed: the file of each tensor, by the index.
        holder: the file that has it.

    Raises:
        ConfigError: with the first tensor that differs, and both files.
    """
    index = path / _INDEX
    for tensor in sorted({*placed} | {*holder}):
        file, has = placed.get(tensor), holder.get(tensor)
        if file == has or (file is None and _BUFFERS.search(tensor)):
            continue
        if has is None:
            fault = f"places {tensor} in {file}, and no file of its set has it"
        elif file is None:
            fault = f"leaves out {tensor}, which {has} has"
        else:
            fault = f"places {tensor} in {file}, and it is in {has}"
        raise ConfigError(f"{index} {fault}", _without_index(index))


def _begins(file: Path, text: bytes) -> bool:
    with suppress(OSError), file.open("rb") as opened:
        return opened.read(len(text)) == text
    return False


def _open_tensors(
    path: Path,
    files: list[Path],
    placed: Mapping[str, str] | None,
    key: str = "model.pretrained",
) -> tuple[dict[str, tuple[int, ...]], Callable[[str], Tensor]]:
    """Return the shape of every tensor, and a function that reads one by name."""
    shapes: dict[str, tuple[int, ...]] = {}
    holder: dict[str, Any] = {}
    where: dict[str, str] = {}
    for file in files:
        try:
            handle = safe_open(file, framework="pt")
        except (SafetensorError, OSError) as error:
            if _begins(file, _LFS):
                raise ConfigError(
                    f"{file} is a pointer of Git LFS, and the weights were not fetched",
                    f"git -C {shlex.quote(str(file.parent))} lfs pull",
                ) from None
            raise ConfigError(f"{file} is damaged: {error}", refetch_command(path)) from None
        for name in handle.keys():  # noqa: SIM118  (a handle is no mapping)
            if name in shapes:
                first = file.parent / where[name]
                raise ConfigError(
                    f"{name} stands twice in {file.parent}: in {first.name} and in {file.name}",
                    f"mv {shlex.quote(str(first))} {shlex.quote(f'{first}.aside')}",
                )
            view = handle.get_slice(name)
            if view.get_dtype() not in _FLOATS:
                raise UnsupportedError(
                    f"{name} in {file} is {view.get_dtype()}; Headrace reads {', '.join(_FLOATS)}",
                    f"{key}=FOLDER of the version that is not quantised",
                )
            shapes[name], holder[name] = tuple(view.get_shape()), handle
            where[name] = file.name
    if placed is not None:
        _check_index(path, placed, where)
    return shapes, lambda name: holder[name].get_tensor(name)

"""Read adapters in PEFT's format: adapter_config.json and adapter_model.safetensors.

PEFT keeps an adapter for each projection, and our linears are fused: those of q, k and v stand side
by side in one. Where they share their first matrix, as those of our own export do, so does the
fused one, and nothing is rounded. Where each has its own, the fused adapter stacks them, of as many
rows as all have together, with zeros where a projection does not read another one's rows. A
projection without an adapter has zeros.

Modules that were saved whole beside adapters (`modules_to_save`) are taken as they are: other
weights in the place of the base's. Where embeddings are tied they are one table, so a file has to
say that its own are too: by `ensure_weight_tying`, or by saving both alike.

A file says by the sha256 of its base (`BASE`, in the header of the tensors) beside which weights it
was trained, where Headrace wrote it; PEFT's own only name a folder, and shapes are all that tells.
"""

import hashlib
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from json import dumps
from math import inf, isfinite, sqrt
from pathlib import Path
from typing import Any

import regex
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from headrace.core.errors import ConfigError, UnsupportedError, interpreting
from headrace.core.folders import refuse_absent
from headrace.core.model_config import ModelConfig
from headrace.core.remedy import mend
from headrace.costs.adapters import TABLES
from headrace.model.adapter import WeightLink, links, read_architecture, read_json, weights_digest
from headrace.model.init import Source

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX = "base_model.model."
"""How PEFT begins the names of the model that it wraps."""
HEAD = "lm_head.weight"
"""What every architecture calls the matrix of its head."""
BASE = "base_sha256"
"""Key of the tensors' header under which the digest of the base stands."""
_ENDS = re.compile(r"(.+)\.(lora_A|lora_B|lora_magnitude_vector)(?:\.weight)?")
_PLAIN: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",),
    "lora_bias": (False,),
    "init_lora_weights": (True, False, "gaussian", "eva", "orthogonal"),
    "layer_replication": (None,),
    "trainable_token_indices": (None,),
    "target_parameters": (None,),
    "alora_invocation_tokens": (None,),
    "use_qalora": (False,),
    "use_bdlora": (None,),
    "arrow_config": (None,),
    "kasa_config": (None,),
    "monteclora_config": (None,),
    "velora_config": (None,),
}
"""Fields of adapter_config.json that make other mathematics, or change the base, and the values at
which they do not."""


@dataclass(frozen=True)
class GivenAdapter:
    """Hold the adapter of one of our linears: W + scale B A, and a length for each row or None.

    Args:
        a: [rank, in], fp32.
        b: [out, rank], fp32.
        scale: what their product is multiplied by.
        lengths: of the rows, fp32 [out], in DoRA.
    """

    a: Tensor
    b: Tensor
    scale: float
    lengths: Tensor | None = None

    @torch.no_grad()
    def merged(self, weight: Tensor) -> Tensor:
        """Return the plain weight that computes what `weight` does with the adapter, fp32."""
        turned = weight.float() + self.scale * (self.b @ self.a)
        if self.lengths is None:
            return turned
        lengths = torch.linalg.vector_norm(turned, dim=1).clamp(min=1e-15)
        return turned * (self.lengths / lengths)[:, None]


@dataclass(frozen=True)
class GivenAdapters:
    """Hold the adapters of a folder, by the full names of our linears.

    Args:
        folder: where they lie.
        of: each linear's.
        whole: the parameters that were saved whole, fp32, by our names.
    """

    folder: Path
    of: Mapping[str, GivenAdapter]
    whole: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def ranks(self) -> dict[str, set[int]]:
        """Return the ranks by the end of a linear's name."""
        by_end: dict[str, set[int]] = {}
        for name, one in self.of.items():
            by_end.setdefault(name.split(".", 2)[2], set()).add(one.a.size(0))
        return by_end


def read_adapters(folder: Path, base: Path, config: ModelConfig, key: str) -> GivenAdapters:
    """Return the adapters of a folder that stand on the weights of `base`.

    Args:
        folder: of PEFT's format.
        base: the folder of the weights.
        config: of the weights.
        key: the plan's key that names the folder.

    Raises:
        ConfigError: there is none, it holds several, is damaged, or is of another base.
        UnsupportedError: adapters of another kind.
    """
    refuse_absent(folder, key)
    if not (folder / CONFIG).is_file():
        raise _no_adapter(folder, key)
    table = read_json(folder / CONFIG)
    _refuse_other_adapters(table, key)
    tensors, digest = _read_tensors(folder / WEIGHTS, key)
    if digest and digest != (here := weights_digest(base)):
        raise _of_another_base(
            folder,
            table,
            f"it was trained beside weights of sha256 {digest[:12]}, and those of "
            f"model.pretrained = {str(base)!r} have {here[:12]}",
            key,
        )
    every = links(config, read_architecture(base))
    known = {HEAD, *(name for link in every for name in link.theirs)}
    grouped: dict[str, dict[str, Tensor]] = {}
    plain: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        match = _ENDS.fullmatch(name.removeprefix(PREFIX))
        if match is not None:
            module, end = match.groups()
            grouped.setdefault(module, {})[end] = tensor
        elif name.removeprefix(PREFIX) in known:
            plain[name.removeprefix(PREFIX)] = tensor
        else:
            raise _unsupported(
                f"{name} in {folder / WEIGHTS} is no lora_A, lora_B or lora_magnitude_vector of a "
                "linear, and no parameter of the base: these are what Headrace reads",
                key,
            )
    whole = _whole(every, plain, folder, table, config, key)
    made: dict[str, GivenAdapter] = {}
    for link in every:
        theirs = [name.removesuffix(".weight") for name in link.theirs]
        if link.ours.endswith(".weight") and any(name in grouped for name in theirs):
            parts = [grouped.pop(name, None) for name in theirs]
            with interpreting(folder / CONFIG, f"{key}=FOLDER of others"):
                scales = [_scale(table, name) for name in theirs]
            ours = link.ours.removesuffix(".weight")
            made[ours] = _fused(link, theirs, parts, scales, folder, table, key)
    if grouped or not made:
        more = f"{next(iter(grouped))}, which this model has not" if grouped else "no adapter"
        raise _of_another_base(folder, table, f"it has {more}", key)
    return GivenAdapters(folder, made, whole)


def _whole(
    every: list[WeightLink],
    plain: dict[str, Tensor],
    folder: Path,
    table: Mapping[str, Any],
    config: ModelConfig,
    key: str,
) -> dict[str, Tensor]:
    """Return the parameters that were saved whole, by our names.

    Raises:
        ConfigError: one is of another base.
        UnsupportedError: one is a part of a linear that is fused here, or unties tied embeddings.
    """
    embed = next(link.theirs[0] for link in every if link.ours == TABLES["embedding"])
    if config.tied_embeddings and plain:
        ties, head = _are_tied(table), plain.pop(HEAD, None)
        first = plain.get(embed, head if ties else None)
        if first is not None or head is not None:
            if first is None or not (ties if head is None else torch.equal(first, head)):
                raise _unsupported(
                    f"{folder / WEIGHTS} has an embedding and a head that differ, and the base of "
                    f"model.pretrained has one table for both",
                    key,
                )
            plain[embed] = first
    made: dict[str, Tensor] = {}
    for link in every:
        parts = [plain.pop(name) for name in link.theirs if name in plain]
        if not parts:
            continue
        if len(parts) < len(link.theirs):
            raise _unsupported(
                f"{folder / WEIGHTS} has a part of {', '.join(link.theirs)} whole, which are one "
                "here",
                key,
            )
        wanted = [*link.to_theirs(torch.empty(link.shape, device="meta")).values()]
        for name, one, want in zip(link.theirs, parts, wanted, strict=True):
            if one.shape != want.shape:
                raise _of_another_base(
                    folder, table, f"{name} has {list(one.shape)}, expected {list(want.shape)}", key
                )
        made[link.ours] = link.to_ours(parts) + link.offset
    return made


def _are_tied(table: Mapping[str, Any]) -> bool:
    """Return whether PEFT kept an embedding and its head one table, which it does by their names.

    GPT-2's `wte` is none of them (peft 0.21.2, EMBEDDING_LAYER_NAMES): its head stays the base's.
    """
    names = {str(name).rpartition(".")[2] for name in table.get("modules_to_save") or ()}
    return bool(table.get("ensure_weight_tying") and names & {"embed_tokens", "lm_head"})


def adapter_digest(folder: Path) -> str:
    """Return the sha256 of a folder of adapters: of what it says of them, and of their numbers.

    Raises:
        ConfigError: a file of it is gone or damaged.
    """
    digest = hashlib.sha256(dumps(read_json(folder / CONFIG), sort_keys=True).encode())
    tensors, _ = _read_tensors(folder / WEIGHTS, "model.adapter")
    for name in sorted(tensors):
        digest.update(name.encode() + tensors[name].numpy().tobytes())
    return digest.hexdigest()


def _no_adapter(folder: Path, key: str) -> ConfigError:
    """Return the error of a folder without a config: it may hold several adapters, by name."""
    inside = sorted(path.parent for path in folder.glob(f"*/{CONFIG}"))
    if not inside:
        return _damaged(
            f"{key} = {str(folder)!r} has no {CONFIG}, which save_pretrained of PEFT and headrace "
            "export --to peft write",
            key,
        )
    names = ", ".join(path.name for path in inside[:8])
    remedy = mend(f"{key}={inside[0]}")
    for path in inside[1:]:
        remedy = remedy | mend(f"{key}={path}")
    return ConfigError(f"{key} = {str(folder)!r} holds several adapters: {names}", remedy)


def _refuse_other_adapters(table: Mapping[str, Any], key: str) -> None:
    for name, plain in {"peft_type": ("LORA",), **_PLAIN}.items():
        value = table.get(name, plain[0])
        if value not in plain:
            raise _unsupported(
                f"{CONFIG} has {name} = {value!r}, and Headrace reads {name} = {plain[0]!r} "
                "(merge_and_unload of PEFT makes a model of any)",
                key,
            )


def _read_tensors(file: Path, key: str) -> tuple[dict[str, Tensor], str]:
    """Return the tensors of a file in fp32, and the digest of the base that its header names.

    Raises:
        ConfigError: the file is not there or damaged, or a number in it is NaN or infinite.
    """
    try:
        with safe_open(file, framework="pt") as opened:
            names = list(opened.keys())
            tensors = {name: opened.get_tensor(name).float() for name in names}
            header = opened.metadata() or {}
    except (SafetensorError, OSError) as error:
        raise _damaged(f"{file} cannot be read: {error}", key) from None
    for name, tensor in tensors.items():
        if wrong := int((~torch.isfinite(tensor)).sum()):
            raise _damaged(
                f"{name} in {file} holds {wrong:,} numbers of {tensor.numel():,} that are NaN or "
                "infinite",
                key,
            )
    return tensors, header.get(BASE, "")


def _scale(table: Mapping[str, Any], module: str) -> float:
    """Return what the correction of a module is multiplied by; patterns are PEFT's expressions."""

    def asked(field: str, default: str) -> float:
        for pattern, value in (table.get(field) or {}).items():
            try:  # some expressions would never end: a useful one takes microseconds
                if regex.fullmatch(rf"(?:.*\.)?(?:{pattern})", module, timeout=2):
                    return float(value)
            except (regex.error, TimeoutError) as error:
                raise ValueError(f"{field} has {pattern!r}: {error}") from None
        return float(table.get(default) or 8)

    rank, alpha = asked("rank_pattern", "r"), asked("alpha_pattern", "lora_alpha")
    if not (isfinite(alpha) and 0 < rank < inf):
        raise ValueError(f"rank {rank} and alpha {alpha} scale nothing")
    return alpha / (sqrt(rank) if table.get("use_rslora") else rank)


def _fused(
    link: WeightLink,
    theirs: list[str],
    parts: list[dict[str, Tensor] | None],
    scales: list[float],
    folder: Path,
    table: Mapping[str, Any],
    key: str,
) -> GivenAdapter:
    """Return the adapter of one of our linears from those of the projections that it fuses."""
    rows = replace(link, transposed=False)
    whole = link.to_theirs(torch.empty(link.shape, device="meta"))
    outs = [one.shape[link.transposed] for one in whole.values()]
    lengths: list[Tensor] = []
    for name, part, out in zip(theirs, parts, outs, strict=True):
        if part is None:
            continue
        a, b = part.get("lora_A"), part.get("lora_B")
        if a is None or b is None:
            raise _damaged(
                f"{name} in {folder / WEIGHTS} has one matrix of an adapter without the other", key
            )
        want = f"[r, {link.shape[1]}] and [{out}, r]"
        if a.shape[1:] != link.shape[1:] or b.shape != (out, a.size(0)):
            has = f"{list(a.shape)} and {list(b.shape)}"
            raise _of_another_base(folder, table, f"{name} has {has}, expected {want}", key)
        if (length := part.get("lora_magnitude_vector")) is not None:
            lengths.append(length.flatten())
    given = [part for part in parts if part is not None]
    if lengths and len(lengths) < len(parts):
        raise _unsupported(
            f"{', '.join(theirs)} are one linear here, and not all of them have learned lengths of "
            "rows",
            key,
        )
    fused_lengths = rows.to_ours(lengths) if lengths else None
    used = {scale for part, scale in zip(parts, scales, strict=True) if part is not None}
    scale = used.pop() if len(used) == 1 else 1.0
    factors = [1.0 if scale == one else one / scale for one in scales]
    first = given[0]["lora_A"]
    if all(torch.equal(part["lora_A"], first) for part in given):
        columns = [
            torch.zeros(out, first.size(0)) if part is None else part["lora_B"] * factor
            for part, out, factor in zip(parts, outs, factors, strict=True)
        ]
        return GivenAdapter(first, rows.to_ours(columns), scale, fused_lengths)
    stacked = torch.cat([part["lora_A"] for part in given])
    columns, before = [], 0
    for part, out, factor in zip(parts, outs, factors, strict=True):
        wide = torch.zeros(out, stacked.size(0))
        if part is not None:
            rank = part["lora_A"].size(0)
            wide[:, before : before + rank] = part["lora_B"] * factor
            before += rank
        columns.append(wide)
    return GivenAdapter(stacked, rows.to_ours(columns), scale, fused_lengths)


def _of_another_base(folder: Path, table: Mapping[str, Any], what: str, key: str) -> ConfigError:
    named = table.get("base_model_name_or_path")
    return ConfigError(
        f"{key} = {str(folder)!r} is of another base, {named!r}: {what}",
        f"model.pretrained=FOLDER of that base, or {key}=FOLDER of others",
    )


def _damaged(problem: str, key: str) -> ConfigError:
    return ConfigError(problem, f"{key}=FOLDER of others")


def _unsupported(problem: str, key: str) -> UnsupportedError:
    return UnsupportedError(problem, f"{key}=FOLDER of others")


def merging(stored: Source, given: GivenAdapters) -> Source:
    """Return `stored` with the adapters in the weights."""

    def source(name: str, shape: torch.Size) -> Tensor:
        if name in given.whole:
            return given.whole[name]
        value, linear = stored(name, shape), name.removesuffix(".weight")
        if name.endswith(".weight") and linear in given.of:
            return given.of[linear].merged(value)
        return value

    return source


def continuing(stored: Source, given: GivenAdapters, scale: Callable[[int], float]) -> Source:
    """Return `stored` with the adapters as the values that adapters begin with.

    Args:
        stored: the source of all else.
        given: the adapters.
        scale: rank -> what the run multiplies a correction of that rank by.
    """

    def source(name: str, shape: torch.Size) -> Tensor:
        if name in given.whole:
            return given.whole[name]
        linear, _, end = name.rpartition(".")
        one = given.of.get(linear)
        if one is None or end not in ("lora_a", "lora_b", "lora_m"):
            return stored(name, shape)
        if end == "lora_b":
            ratio = one.scale / scale(one.a.size(0))
            return one.b if ratio == 1 else one.b * ratio
        value = one.a if end == "lora_a" else one.lengths
        assert value is not None
        return value

    return source


def check_continues(
    given: GivenAdapters,
    asked: Mapping[str, int],
    owner: str,
    *,
    magnitudes: bool,
    tables: Sequence[str],
    key: str,
) -> None:
    """Refuse adapters that are not those which a technique would train.

    Args:
        given: the adapters of a folder.
        asked: the rank that the technique asks for, by the full names of its linears.
        owner: the technique.
        magnitudes: whether it learns lengths of rows.
        tables: what it trains whole beside them, by the names of the parameters.
        key: the plan's key that names the folder.

    Raises:
        ConfigError: with the words that make the technique train them.
    """
    has = {name: one.a.size(0) for name, one in given.of.items()}
    lengths = {one.lengths is not None for one in given.of.values()}
    where = f"{key} = {str(given.folder)!r}"
    if {*given.whole} != {*tables}:
        _refuse_other_tables(given, tables, owner, where)
    if len(lengths) == 1 and magnitudes not in lengths:
        fits, does = ("dora", "has") if True in lengths else ("lora", "has not")
        raise ConfigError(
            f"{where} {does} learned lengths of rows, which {owner} "
            f"{'learns' if magnitudes else 'does not learn'}",
            mend(f"-{owner}", f"+{fits}"),
        )
    if has == asked and len(lengths) == 1:
        return
    layers = {name.split(".", 2)[1] for name in asked}
    ranks = given.ranks
    alike = all(len(one) == 1 for one in ranks.values()) and len(lengths) == 1
    if not alike or len(has) != len(layers) * len(ranks):
        raise ConfigError(
            f"{where} has adapters beside {len(has)} linears, not of one rank in all "
            f"{len(layers)} layers, and {owner} trains all layers alike",
            mend(f"-{owner}", text=f"--without {owner}, which adds them to the weights"),
        )
    wanted = {name.split(".", 2)[2]: rank for name, rank in asked.items()}
    given_ranks = {end: next(iter(one)) for end, one in ranks.items()}
    raise ConfigError(
        f"{where} has adapters of {_listed(given_ranks)}, and {owner} asks for {_listed(wanted)}",
        mend(
            f"techniques.{owner}.targets={dumps(list(given_ranks))}",
            f"techniques.{owner}.ranks={list(given_ranks.values())}",
        ),
    )


def _refuse_other_tables(
    given: GivenAdapters, tables: Sequence[str], owner: str, where: str
) -> None:
    """Refuse a folder that saved other parameters whole than a technique trains."""
    has = ", ".join(sorted(given.whole)) or "no parameter"
    asked = [key for key, name in TABLES.items() if name in given.whole]
    if {*given.whole} <= {*TABLES.values()}:
        fits = mend(f"techniques.{owner}.train_also={dumps(asked)}")
    else:
        fits = mend(f"-{owner}", text=f"--without {owner}, which adds them to the weights")
    raise ConfigError(
        f"{where} has {has} whole beside its adapters, and {owner} trains "
        f"{', '.join(tables) or 'none'} whole",
        fits,
    )


def _listed(ranks: Mapping[str, int]) -> str:
    return ", ".join(f"{end} (rank {rank})" for end, rank in ranks.items())

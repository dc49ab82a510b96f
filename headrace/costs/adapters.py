"""Count what adapters beside frozen weights cost: memory by line, FLOPs by phase, work by piece.

Only adapters have gradients and states. The frozen weights keep their products forward and for
inputs' gradients; what lies before the first adapter needs no gradient at all.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from json import dumps
from math import prod
from typing import Literal

from headrace.core.errors import ConfigError, nearest
from headrace.core.remedy import Remedy, mend
from headrace.costs.decoder_work import FROZEN, LEARNED
from headrace.costs.ledger import Ledger, Line, Matrix
from headrace.costs.work import Matmul, Phase, Stream, Work

MATRICES = (".lora_a", ".lora_b")
"""How the names of the two matrices of an adapter end."""
ADAPTERS = (*MATRICES, ".lora_m")
"""How the names of adapters' parameters end: matrices, and learned lengths of rows."""
ROWS = ("mixer.out", "mlp.down")
"""Linears of a block that tensor ranks share by their inputs; others are shared by outputs."""
LENT = ".router"
"""How the name of a linear ends that lends its weight and is not called: what would replace it
would not learn."""
LAST = "mlp.down/adapter_forward"
"""A sum that nothing needs again, nor the product with the frozen weight in it."""
PIECE = "mlp_piece"
"""The line of a ledger whose MLPs go in pieces that run again, each from its input."""
PIECES = "mlp/pieces"
"""A size: pieces of tokens that an MLP goes in, where it does."""
StoredBytes = Callable[[int, int, int], float | None]
"""A function of a layer, and of the features in and out of an adapted weight there: its bytes; None
where it stays as it is."""
ALONE = "mixer.out/alone"
"""A size: bytes that a mixer keeps as its last linear's input and does not read itself."""
GATES = "mixer.gates/alone"
"""A size: bytes that a mixer's states keep for the gradients of its gates alone."""
TABLES: Mapping[str, str] = {"embedding": "embed.weight", "head": "head.weight"}
"""What may learn whole beside adapters, and the name of its parameter; one where both are tied."""
TRAINED, UNSPLIT = "adapters/trained", "adapters/unsplit"
"""Sizes: the numbers of all that learns, and those of them that each tensor rank has whole."""
LENGTHS = "adapters/lengths"
"""A size: FLOPs of finding how long all adapted rows are, once."""
BEFORE = "adapters/before"
"""A size: parts of the first block, attention and MLP, whose input gets no gradient; 0 where the
embedding learns."""
NORM_RESULTS = "adapters/norm_results"
"""A size: results of its norms that a block keeps."""
SCALES = "adapters/scales"
"""A size: bytes of stored weights that each tensor rank has whole, as the scales of cut rows."""
CUT_RESULTS = "adapters/cut_results"
"""A size: features that a block keeps inside of adapters, of which a tensor rank has a part."""
AROUND, MLP = ("residual", "norm", "weight_cast"), ("gate_up", "activation", "routed", "router")
"""Lines of a block around its parts, and of its MLP; the others are its mixer's."""


@dataclass(frozen=True)
class AdapterSizes:
    """Hold the sizes of the adapters beside a model's linears.

    Args:
        targets: ends of names of the adapted linears; all of the blocks' without targets.
        rank: rows of an adapter's first matrix.
        ranks: the same for each of `targets`, in the place of `rank`; none for all alike.
        magnitudes: whether the lengths of the adapted weights' rows learn too.
        also: what learns whole beside them, keys of `TABLES`.
    """

    targets: tuple[str, ...] = ()
    rank: int = 16
    ranks: tuple[int, ...] = ()
    magnitudes: bool = False
    also: tuple[str, ...] = ()

    def tables(self, *, tied: bool) -> list[str]:
        """Return the names of the parameters that learn whole beside adapters, in one order."""
        if self.also and tied:
            return [TABLES["embedding"]]
        return [name for key, name in TABLES.items() if key in self.also]

    def rank_of(self, end: str) -> int:
        """Return the rank beside the linear that a block calls `end`."""
        return dict(zip(self.targets, self.ranks, strict=False)).get(end, self.rank)

    def numbers(self, end: str, shape: tuple[int, ...]) -> int:
        """Return the numbers of both matrices beside a linear of `shape`, [out, in]."""
        return self.rank_of(end) * sum(shape)

    def lengths_flops(self, end: str, shape: tuple[int, ...]) -> int:
        """Return FLOPs of finding how long the adapted rows are, once a forward pass."""
        rank, (outer, inner) = self.rank_of(end), shape
        return 2 * rank * (outer * inner + rank * (outer + inner)) if self.magnitudes else 0


def adapted_ledger(
    ledger: Ledger,
    owner: str,
    adapters: AdapterSizes,
    stored: StoredBytes | None,
) -> Ledger:
    """Return the ledger of a model of which only adapters learn.

    Args:
        ledger: of the model that learns whole.
        owner: the technique.
        adapters: their sizes.
        stored: what adapted weights take; None leaves all fp32.

    Raises:
        ConfigError: the ledger knows none of the targets, or another technique replaces one.
    """
    sizes, layers = ledger.sizes, int(ledger.sizes["layers"])
    linears = {n: m.shape for n, m in ledger.matrices.items() if _is_linear(n, m)}
    chosen = _chosen(list(dict.fromkeys(map(_end, linears))), adapters.targets, owner)
    ledger = ledger.with_linears(owner, chosen)
    taken = {name: shape for name, shape in linears.items() if _end(name) in chosen}
    in_matrices, memory = _total(adapters.numbers, taken), ledger.memory
    added = in_matrices + adapters.magnitudes * sum(outer for outer, _ in taken.values())
    tables = adapters.tables(tied=sizes["tied"] > 0)
    numbers = added + len(tables) * sizes["embedding"]
    asked = {n: stored(_layer(n), *shape[::-1]) for n, shape in taken.items()} if stored else {}
    quantized = {name: bytes for name, bytes in asked.items() if bytes is not None}
    saved = sum(4 * prod(taken[name]) - bytes for name, bytes in quantized.items())
    for name, count in {
        "parameters": memory["parameters"].bytes + 4 * added - saved,
        "gradients": 4 * numbers,
        "optimizer": 8 * numbers,
        # Frozen weights of norm and head need neither the normalised values nor the result; a GPU's
        # norm is one kernel that keeps its fp32 input. The loss's caller holds the result
        # meanwhile.
        "final_norm": sizes["on_gpu"] * 4 * sizes["tokens"] * sizes["dim"] + sizes["residual"],
    }.items():
        ledger = ledger.with_line(name, replace(memory[name], bytes=count))
    if quantized:  # one weight at a time is made whole
        largest = max(map(prod, taken.values()))
        ledger = ledger.with_line("whole_weight", Line(4 * largest, ("backward",)))
    for layer in range(layers):
        is_stored = any(_layer(name) == layer for name in quantized)
        ledger = _adapted_block(ledger, layer, taken, adapters, is_stored)
    if PIECE in memory:  # of which each runs again
        in_mlp = {name: shape for name, shape in taken.items() if _end(name).startswith("mlp.")}
        ledger = ledger.with_flops("recompute", 2 * _total(adapters.numbers, in_mlp))
    # Forward: the adapters beside all.
    lengths = _total(adapters.lengths_flops, taken)
    forward = ledger.flops["forward"] + 2 * in_matrices + lengths / sizes["tokens"]
    backward = _backward_flops(sizes, linears, taken, adapters)
    flops = {**ledger.flops, "forward": forward, "backward": backward}
    matrices = _with_adapters(ledger, taken, adapters, quantized)
    unsplit = _unsplit(matrices, taken, adapters)
    sizes = {**sizes, LENGTHS: float(lengths), TRAINED: float(numbers), UNSPLIT: float(unsplit)}
    sizes |= _kept_sizes(ledger, chosen, adapters)
    return replace(ledger, sizes=sizes, flops=flops, matrices=matrices)


def _kept_sizes(ledger: Ledger, chosen: Sequence[str], adapters: AdapterSizes) -> dict[str, float]:
    """Return the sizes that say what a rank keeps and sends which has a part of each linear.

    Args:
        ledger: with the memory of a model of which only adapters learn.
        chosen: what a block calls the adapted linears.
        adapters: their sizes.
    """
    sizes = ledger.sizes
    tables = adapters.tables(tied=sizes["tied"] > 0)
    in_mixer = any(name.startswith("mixer.") for name in chosen)
    cut = sum(sizes.get(f"{name}/out", 0.0) for name in chosen if name not in ROWS)
    return {
        BEFORE: 0.0 if TABLES["embedding"] in tables else 1.0 if in_mixer else 2.0,
        NORM_RESULTS: float(bool(_into_mixer(chosen))) + _is_kept_for_mlp(ledger, chosen),
        CUT_RESULTS: adapters.magnitudes * cut,
    }


def _backward_flops(
    sizes: Mapping[str, float],
    linears: Mapping[str, tuple[int, ...]],
    taken: Mapping[str, tuple[int, ...]],
    adapters: AdapterSizes,
) -> float:
    """Return FLOPs per token of the backward pass: inputs' gradients, and those of what learns.

    What lies before the first adapter needs no gradient at all, unless the embedding learns.

    Args:
        sizes: of the ledger.
        linears: shapes of all linears of blocks, by the names of their weights.
        taken: the same of the adapted ones.
        adapters: their sizes.
    """
    names, tables = list(linears), adapters.tables(tied=sizes["tied"] > 0)
    first = names.index(next(iter(taken)))
    before = sum(prod(linears[name]) for name in names[: first + 1])
    unmoved = before + adapters.rank_of(_end(names[first])) * linears[names[first]][1]
    attention = sizes["attention_flops"] * (1 - (first > 0) / sizes["layers"])
    if TABLES["embedding"] in tables:
        unmoved, attention = 0, sizes["attention_flops"]
    frozen = sizes["block_flops"] / 2 + sizes["embedding"]
    learned = 2 * _total(adapters.numbers, taken) + _has_head(tables, sizes) * sizes["embedding"]
    return 2 * (frozen + learned - unmoved + attention)


def is_unsplit(name: str) -> bool:
    """Return whether the parameter of this name is an adapter's that each tensor rank has whole.

    Where ranks share outputs that is the first matrix, and where they share inputs the second.
    """
    linear, _, end = name.rpartition(".")
    if f".{end}" not in MATRICES:
        return False
    return end == ("lora_b" if linear.split(".", 2)[2] in ROWS else "lora_a")


def _unsplit(
    matrices: Mapping[str, Matrix], taken: Mapping[str, tuple[int, ...]], adapters: AdapterSizes
) -> int:
    """Return the numbers of adapters that each tensor rank has whole."""
    unsplit = sum(prod(matrix.shape) for name, matrix in matrices.items() if is_unsplit(name))
    lengths = sum(outer for name, (outer, _) in taken.items() if _end(name) in ROWS)
    return unsplit + adapters.magnitudes * lengths


def _total(
    count: Callable[[str, tuple[int, ...]], int], taken: Mapping[str, tuple[int, ...]]
) -> int:
    """Return the sum of `count` over linears, given by what a block calls them and their shapes."""
    return sum(count(_end(name), shape) for name, shape in taken.items())


def with_adapters_alone(
    ledger: Ledger,
    owner: str,
    adapters: AdapterSizes,
    stored: StoredBytes | None = None,
) -> Ledger:
    """Return the memory and the work of a model of which only adapters learn.

    Args:
        ledger: of the model that learns whole.
        owner: the technique.
        adapters: their sizes.
        stored: what adapted weights take; None leaves all fp32.

    Raises:
        ConfigError: see `adapted_ledger`.
    """
    made = adapted_ledger(ledger, owner, adapters, stored)
    share = made.memory["gradients"].bytes / ledger.memory["gradients"].bytes
    if not _has_head(adapters.tables(tied=made.sizes["tied"] > 0), made.sizes):
        made = made.without(["head_weight_gradient"])
    return _adapted_work(made, adapters, share)


def _has_head(tables: Sequence[str], sizes: Mapping[str, float]) -> bool:
    """Return whether the head's matrix learns, which is the embedding's where both are tied."""
    return TABLES["head"] in tables or bool(tables and sizes["tied"])


def _adapted_work(ledger: Ledger, adapters: AdapterSizes, share: float) -> Ledger:
    """Return the ledger's work where adapters learn beside frozen weights.

    Args:
        ledger: before, of weights that all learn.
        adapters: their sizes.
        share: adapters' numbers over all that would learn without them.
    """
    sizes, more = ledger.sizes, dict[str, Work]()
    tokens, layers = int(sizes["tokens"]), sizes["layers"]
    row = sizes["activation_bytes"] * tokens
    precision = next((p.precision for p in ledger.work.values() if isinstance(p, Matmul)), "bf16")
    every = [key[:-3] for key in sizes if key.endswith("/in")]
    for name in (n for n in every if not adapters.targets or n in adapters.targets):
        rank = adapters.rank_of(name)
        inner, outer = int(sizes[f"{name}/in"]), int(sizes[f"{name}/out"])
        matmuls: dict[str, tuple[Phase, tuple[int, int, int]]] = {
            "down": ("forward", (tokens, rank, inner)),
            "up": ("forward", (tokens, outer, rank)),
            "up_input": ("backward", (tokens, rank, outer)),
            "up_weight": ("backward", (outer, rank, tokens)),
            "down_input": ("backward", (tokens, inner, rank)),
            "down_weight": ("backward", (rank, inner, tokens)),
        }
        for what, (phase, shape) in matmuls.items():
            more[f"{name}/adapter_{what}"] = Matmul(phase, layers, shape, precision)
        # Both results are added up, and so are both gradients of the input.
        sums: dict[Phase, float] = {"forward": row * outer, "backward": row * inner}
        for phase, bytes in sums.items():
            piece = Stream(phase, layers, 3 * bytes, fused=bytes)
            more[f"{name}/adapter_{phase}"] = piece
        if adapters.magnitudes:  # a weight is read for its rows' lengths, results are scaled
            more[f"{name}/adapter_lengths"] = Matmul(
                "forward", layers, (outer, rank, inner), "fp32"
            )
            read = 4 * inner * outer
            more[f"{name}/adapter_read"] = Stream("forward", layers, read, fused=read)
            scaled: dict[Phase, float] = {"forward": 2 * row * outer, "backward": 3 * row * outer}
            for phase, bytes in scaled.items():
                piece = Stream(phase, layers, bytes, fused=bytes)
                more[f"{name}/adapter_scaled_{phase}"] = piece

    tables = adapters.tables(tied=sizes["tied"] > 0)
    has_embedding = TABLES["embedding"] in tables
    kept = {"embedding/backward", "embedding_smear/backward"} if has_embedding else set[str]()
    if _has_head(tables, sizes):
        kept |= {"head/weight", "head_cast/backward"}

    def edit(name: str, piece: Work) -> Work | None:
        if name in kept:
            return piece
        if name.endswith(("/weight", "/sum")) or name in FROZEN:
            return None
        if name.startswith(LEARNED):
            return piece.with_bytes(lambda bytes: share * bytes)
        if name == "mixer.qkv/input" and not has_embedding:  # nothing before the first block learns
            return replace(piece, count=piece.count - 1)
        return piece

    ledger = ledger.reworked(edit)
    return replace(ledger, work={**ledger.work, **more})


def _with_adapters(
    ledger: Ledger,
    taken: Mapping[str, tuple[int, ...]],
    adapters: AdapterSizes,
    quantized: Mapping[str, float],
) -> dict[str, Matrix]:
    """Return the ledger's matrices with adapters beside the taken ones, of which some are stored.

    Args:
        ledger: of the model without adapters.
        taken: shapes of the adapted weights by name.
        adapters: their sizes.
        quantized: bytes of the weights that are stored in few bits, by name.
    """
    matrices = {name: replace(matrix, by="") for name, matrix in ledger.matrices.items()}
    for name, bytes in quantized.items():
        matrices[name] = replace(matrices[name], stored=bytes / prod(taken[name]))
    for name, (outer, inner) in taken.items():
        rank = adapters.rank_of(_end(name))
        for end, shape in zip(MATRICES, ((rank, inner), (outer, rank)), strict=True):
            matrices[name.removesuffix(".weight") + end] = Matrix(shape)
    return matrices


def recomputed_adapter_flops(ledger: Ledger, *matmuls: Literal["down", "up"]) -> float:
    """Return FLOPs per token of these matmuls of all adapters, where all blocks are recomputed.

    Beside the first of them the lengths of rows are found again.
    """
    ends = tuple(f"/adapter_{matmul}" for matmul in matmuls)
    flops = sum(
        piece.count * 2 * piece.sizes[1] * piece.sizes[2]
        for name, piece in ledger.work.items()
        if name.endswith(ends) and isinstance(piece, Matmul)
    )
    lengths = ledger.sizes.get(LENGTHS, 0.0) if "down" in matmuls else 0.0
    return flops + lengths / ledger.sizes["tokens"]


def _is_linear(name: str, matrix: Matrix) -> bool:
    """Return whether the weight is one of a linear that can be adapted."""
    inside = name.startswith("blocks.") and not name.endswith(f"{LENT}.weight")
    return inside and len(matrix.shape) == 2


def _end(name: str) -> str:
    """Return what the linear of a weight is called in its block."""
    return name.split(".", 2)[2].removesuffix(".weight")


def _layer(name: str) -> int:
    """Return the block that a weight is of, from its full name."""
    return int(name.split(".", 2)[1])


def targeted(owner: str, *targets: str) -> Remedy:
    """Return the override that adapts these linears."""
    return mend(f"techniques.{owner}.targets={dumps(targets)}")


def _chosen(every: Sequence[str], targets: Sequence[str], owner: str) -> list[str]:
    """Return those of a block's linears that are adapted, one at least."""
    chosen = [name for name in every if not targets or name in targets]
    if not chosen:
        raise ConfigError(
            f"none of targets = {list(targets)} is in a block of this model, which has "
            f"{', '.join(every)}",
            targeted(owner, *nearest(targets[0], every).split(", "))
            if targets
            else mend(f"-{owner}"),
        )
    return chosen


def _adapted_block(
    ledger: Ledger,
    layer: int,
    taken: Mapping[str, tuple[int, ...]],
    adapters: AdapterSizes,
    quantized: bool,
) -> Ledger:
    """Keep in a block the inputs of adapted linears and the results inside of adapters."""
    sizes, memory = ledger.sizes, ledger.memory
    here = {_end(n): shape for n, shape in taken.items() if n.startswith(f"blocks.{layer}.")}
    chosen = list(dict.fromkeys(_end(name) for name in taken))
    dim = sizes["mixer.qkv/in"]
    row = sizes["residual"] / dim  # bytes of one feature of all tokens
    less = {"norm": sizes["norm_products"], "qk_norm": sizes["qk_norm_products"]}
    less["norm"] += row * dim * (not _into_mixer(chosen))
    less["norm"] += row * dim * (not _is_kept_for_mlp(ledger, chosen))
    # A frozen linear keeps no input; experts, which are none, keep theirs.
    frozen = f"blocks.{layer}.mlp.down.weight" in ledger.matrices and "mlp.down" not in chosen
    less["activation"] = row * sizes["mlp.down/in"] * frozen
    less["attention"] = sizes.get(ALONE, 0.0) * ("mixer.out" not in chosen)
    less["weight_cast"] = 2 * sum(map(prod, here.values())) if quantized else 0
    is_first = layer == 0 and TABLES["embedding"] not in adapters.tables(tied=sizes["tied"] > 0)
    less["residual"] = row * dim * is_first  # the embedding is frozen
    if is_first and "mixer.qkv" not in chosen:
        less |= {name: float("inf") for name in ("qkv", "attention_input", "qk_norm")}
    for name, count in less.items():
        line = memory.get(f"{layer}/{name}")
        if line is not None:
            kept = replace(line, bytes=max(0.0, line.bytes - count))
            ledger = ledger.with_line(f"{layer}/{name}", kept)
    if is_first:
        ledger = _first_block(ledger, here, row)
    kept_features = sum(
        adapters.rank_of(end) + adapters.magnitudes * shape[0] for end, shape in here.items()
    )
    adapter = replace(memory[f"{layer}/residual"], bytes=kept_features * row)
    return ledger.with_line(f"{layer}/adapters", adapter)


def _is_kept_for_mlp(ledger: Ledger, chosen: Iterable[str]) -> bool:
    """Return whether what enters the MLP is kept, by an adapted linear or by recomputed pieces."""
    return PIECE in ledger.memory or not {"mlp.gate_up", "mlp.up"}.isdisjoint(chosen)


def _first_block(ledger: Ledger, here: Mapping[str, tuple[int, ...]], row: float) -> Ledger:
    """Drop what lies before the first adapter, which no gradient reaches; keep the block's input.

    Args:
        ledger: with a first block into which a gradient goes.
        here: shapes of the adapted linears by what a block calls them.
        row: bytes of one feature of all tokens.
    """
    if into := _into_mixer(here):
        states = ledger.memory.get("0/states")
        if into == ["mixer.qkv"] and states is not None:  # gates of a frozen input are given
            left = replace(states, bytes=states.bytes - ledger.sizes.get(GATES, 0.0))
            ledger = ledger.with_line("0/states", left)
        return ledger
    lines = {n.removeprefix("0/"): line for n, line in ledger.memory.items() if line.layer == 0}
    kept = {name: 0.0 for name in lines if name not in (*AROUND, *MLP)}
    entered = "mlp.gate_up" in here or "mlp.up" in here
    result = row * ledger.sizes["dim"] * _is_kept_for_mlp(ledger, here)  # of the norm before it
    if "mixer.out" in here:
        kept["attention"] = row * here["mixer.out"][1]
        kept["norm"] = result + (lines["norm"].bytes - result) / 2
    else:
        kept |= {"residual": 0.0, "norm": result}
        if not entered:
            kept |= {"gate_up": 0.0, "activation": row * here["mlp.down"][1]}
    for name, count in kept.items():
        if name in lines:
            ledger = ledger.with_line(f"0/{name}", replace(lines[name], bytes=count))
    return ledger


def _into_mixer(names: Iterable[str]) -> list[str]:
    """Return those of a block's linears that read what its mixer reads."""
    return [name for name in names if name.startswith("mixer.") and name != "mixer.out"]

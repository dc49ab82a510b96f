"""Count what the baseline trainer costs from shapes: the ledger that techniques edit.

Memory is counted for eager torch, line by line, as autograd keeps it. `s` is the bytes of an
activation (4 in fp32, 2 under bf16). FLOPs count a multiply-add as two.

Shapes: N = rows x length tokens, D features, L layers, H x K query features, G x K key features.
"""

from collections.abc import Mapping
from dataclasses import replace

from headrace.core.model_config import ModelConfig
from headrace.costs.ledger import Instant, Ledger, Line, Matrix

FP32 = 4
PLACE = 8
"""Bytes of a row's number in a table."""


def linear_parameters(config: ModelConfig) -> int:
    """Return the number of weights of all matrices that a token is multiplied with.

    The output matrix is among them.
    """
    heads, kv, width = config.heads, config.resolved_kv_heads, config.resolved_head_dim
    attention = config.dim * width * (heads + 2 * kv) + heads * width * config.dim
    mlp = config.dim * config.resolved_ffn * (3 if config.gated else 2)
    return config.layers * (attention + mlp) + config.dim * config.vocab


def block_linears(config: ModelConfig) -> dict[str, tuple[int, int]]:
    """Return (features in, features out) of each linear of a block, by the end of its name."""
    heads, width = config.heads, config.resolved_head_dim
    dim, ffn = config.dim, config.resolved_ffn
    gated = config.gated
    return {
        "mixer.qkv": (dim, (heads + 2 * config.resolved_kv_heads) * width),
        "mixer.out": (heads * width, dim),
        "mlp.gate_up" if gated else "mlp.up": (dim, (2 if gated else 1) * ffn),
        "mlp.down": (ffn, dim),
    }


def matrices_of(config: ModelConfig) -> dict[str, Matrix]:
    """Return all parameters of two dimensions by name."""
    matrices = {"embed.weight": Matrix((config.vocab, config.dim))}
    rows = Matrix((config.vocab, config.resolved_kv_heads * config.resolved_head_dim))
    matrices |= {f"value_embed.{n}.weight": rows for n in range(config.value_embeddings)}
    if config.bigram_rows:
        matrices["pairs.embed.weight"] = Matrix((config.bigram_rows, config.dim))
    if config.position == "learned":
        matrices["position.weight"] = Matrix((config.context, config.dim))
    for layer in range(config.layers):
        for name, (inner, outer) in block_linears(config).items():
            matrices[f"blocks.{layer}.{name}.weight"] = Matrix((outer, inner))
    if not config.tied_embeddings:
        matrices["head.weight"] = matrices["embed.weight"]
    return matrices


def total_parameters(config: ModelConfig) -> int:
    """Return the count of all trained numbers."""
    count = linear_parameters(config)
    if not config.tied_embeddings:
        count += config.dim * config.vocab
    if config.position == "learned":
        count += config.context * config.dim
    count += _norm_numbers(config) * config.norms + further_tables(config)
    count += _qk_norm_numbers(config) + _factors(config) + _smear_numbers(config)
    if config.bias:
        heads = config.heads + 2 * config.resolved_kv_heads
        gates = 2 if config.gated else 1
        per_layer = heads * config.resolved_head_dim + 2 * config.dim + gates * config.resolved_ffn
        count += config.layers * per_layer
    elif config.qkv_bias:
        heads = config.heads + 2 * config.resolved_kv_heads
        count += config.layers * heads * config.resolved_head_dim
    return count


def parameters_in_blocks(config: ModelConfig) -> int:
    """Return the count of all trained numbers but the tables that have a row for each token."""
    tables = (1 if config.tied_embeddings else 2) * config.vocab * config.dim
    return total_parameters(config) - tables - further_tables(config)


def _norm_numbers(config: ModelConfig) -> int:
    """Return the learned numbers of one norm of the residual stream."""
    return config.dim * {"rms_norm": 1, "unit_rms_norm": 0, "layer_norm": 2}[config.norm]


def _qk_norm_numbers(config: ModelConfig) -> int:
    """Return the learned numbers of all norms of queries and keys."""
    learns = config.qk_norm and config.has_norm_weights
    return 2 * config.layers * config.resolved_head_dim if learns else 0


def further_tables(config: ModelConfig) -> int:
    """Return the numbers of all value embeddings, and of the table for pairs of tokens.

    Scaling laws do not count them: a token reads a row of each, and no product has them.
    """
    values = config.resolved_kv_heads * config.resolved_head_dim
    return config.value_embeddings * config.vocab * values + config.bigram_rows * config.dim


def _smear_numbers(config: ModelConfig) -> int:
    """Return the shares that a token's embedding has of the one before."""
    return config.dim * config.embedding_smear


def _factors(config: ModelConfig) -> int:
    """Return the factors with which blocks read the embedding again: two for each use."""
    return 2 * (len(config.table_of_layer) + config.embedding_residual * config.layers)


def model_flops_per_token(config: ModelConfig, length: int) -> float:
    """Return the model's own FLOPs per token: 6 N + 12 L d T.

    The formula is PaLM's (arXiv 2204.02311, appendix B).

    N counts the matrices with the output matrix and without the embedding; recomputation is not
    counted, and attention is counted whole, causal or not.
    """
    attention = 12 * config.layers * config.heads * config.resolved_head_dim * length
    return 6.0 * linear_parameters(config) + attention


def baseline_ledger(
    config: ModelConfig,
    *,
    rows: int,
    length: int,
    precision: str,
    device: str,
    accumulates: bool = False,
) -> Ledger:
    """Return the baseline's costs for one micro-batch of `rows` x `length` tokens.

    Args:
        config: the decoder.
        rows: rows of the micro-batch.
        length: tokens of a row.
        precision: "fp32", "bf16" or "fp16".
        device: "cpu" keeps what its kernels keep.
        accumulates: a step has several micro-batches, so that gradients are held in all but the
            first one's forward pass.
    """
    config = config.model_copy(update={"context": config.context or length})
    parameters = total_parameters(config)
    tokens = rows * length
    size = FP32 if precision == "fp32" else 2
    memory = {
        "parameters": Line(FP32 * parameters, ("always",)),
        "gradients": Line(
            FP32 * parameters, ("always",) if accumulates else ("backward", "optimizer")
        ),
        "optimizer": Line(2 * FP32 * parameters, ("always",)),
    }
    matrices = linear_parameters(config) - config.dim * config.vocab
    for layer in range(config.layers):
        kept = instants_of(layer)
        for name, count in _block_activations(config, tokens, size, device).items():
            memory[f"{layer}/{name}"] = Line(count, kept, layer)
        if config.embedding_residual:  # the stream, of which the norm keeps a sum
            stream = FP32 if precision == "fp16" else size
            memory[f"{layer}/stream"] = Line(stream * tokens * config.dim, kept, layer)
        if layer in config.table_of_layer:
            values = config.resolved_kv_heads * config.resolved_head_dim
            memory[f"{layer}/value"] = Line(size * tokens * values, kept, layer)
        if size != FP32:  # autocast's copies of fp32 weights are kept for the backward pass
            memory[f"{layer}/weight_cast"] = Line(2 * matrices / config.layers, kept, layer)
    memory |= _from_embedding(config, tokens, size)
    memory["final_norm"] = Line(_final_norm_bytes(config, tokens, size, device), ("loss",))
    memory["logits"] = Line(_logits_bytes(config, tokens), ("loss",))
    if size != FP32:
        memory["head_cast"] = Line(size * config.dim * config.vocab, ("loss",))
    if config.position == "rope" and device == "cuda":  # cosine and sine, shared by all blocks
        angles = FP32 * tokens * config.resolved_head_dim
        memory["rotation"] = Line(angles, ("loss", "turn", "backward"))
    if device == "cuda":
        memory["work"] = Line(_work_bytes(config, tokens, size), ("turn", "backward"))
        if not accumulates:
            table = FP32 * config.dim * config.vocab
            memory["head_weight_gradient"] = Line(table, ("turn",))
    forward = 2.0 * linear_parameters(config) + _attention_flops(config, length)
    sizes = _sizes(config, rows, length, size, device)
    sizes["stream_bytes"] = FP32 if precision == "fp16" else size
    flops = {"forward": forward, "backward": 2 * forward}
    return Ledger(memory, flops, sizes, matrices=matrices_of(config))


def _from_embedding(config: ModelConfig, tokens: int, size: int) -> dict[str, Line]:
    """Return what is kept of what the first block reads, and of rows of values."""
    kept: tuple[Instant, ...] = ("loss", "turn", "backward")
    lines: dict[str, Line] = {}
    if config.bigram_rows:
        lines["pairs"] = Line(PLACE * tokens, kept)
    if config.embedding_smear:
        lines["embedding_smear"] = Line(FP32 * tokens * config.dim, kept)
    if config.embedding_norm:
        lines["embedding_norm"] = Line(FP32 * tokens * config.dim, kept)
    if config.value_embeddings:
        rows = config.value_embeddings * config.resolved_kv_heads * config.resolved_head_dim
        lines["values"] = Line(size * tokens * rows, kept)
    return lines


def _sizes(config: ModelConfig, rows: int, length: int, size: int, device: str) -> dict[str, float]:
    """Return the facts that techniques make their edits from."""
    tokens, matrices = rows * length, linear_parameters(config) - config.dim * config.vocab
    queries_and_keys = (config.heads + config.resolved_kv_heads) * config.resolved_head_dim
    learned = config.position == "learned"
    host = device != "cuda"  # where an RMS norm is composed of operations
    composed = host and config.norm != "layer_norm"
    weighed = composed and config.has_norm_weights
    qk_weighed = host and config.qk_norm and config.has_norm_weights
    hidden = FP32 if host else size
    sizes = {
        "layers": config.layers,
        "composed_norms": float(composed),
        "norm_products": 2 * size * tokens * config.dim if weighed else 0,
        "qk_norm_products": FP32 * tokens * queries_and_keys if qk_weighed else 0,
        "residual": size * tokens * config.dim,
        "logits_per_token": _logits_bytes(config, 1),
        "logits_fused": 3 * size * tokens * config.vocab,
        "head_gradients": FP32 * config.dim * config.vocab + hidden * config.dim * tokens,
        "rows": rows,
        "length": length,
        "tokens": tokens,
        "dim": config.dim,
        "vocab": config.vocab,
        "capped": float(config.logit_cap > 0),
        "heads": config.heads,
        "kv_heads": config.resolved_kv_heads,
        "head_dim": config.resolved_head_dim,
        "ffn": config.resolved_ffn,
        "activation_bytes": size,
        "embedding": config.dim * config.vocab,
        "tables": config.dim * (config.vocab + (config.context if learned else 0))
        + further_tables(config),
        "pairs": config.bigram_rows * config.dim,
        "entering": _smear_numbers(config) + (config.context * config.dim if learned else 0),
        "unsplit": _unsplit_parameters(config),
        "final_norm": _norm_numbers(config),
        "tied": float(config.tied_embeddings),
        "block_flops": 2.0 * matrices,
        "down_flops": 2.0 * config.layers * config.dim * config.resolved_ffn,
        "attention_flops": _attention_flops(config, length),
        "mask": rows * length**2,
        # A CPU's kernel keeps a mask of flags as fp32 numbers, a GPU's in the run's precision.
        "mask_copy": (FP32 if device == "cpu" else size) * rows * length**2,
        "on_gpu": float(device == "cuda"),
    }
    for name, (inner, outer) in block_linears(config).items():
        sizes |= {f"{name}/in": inner, f"{name}/out": outer}
    return sizes


def _unsplit_parameters(config: ModelConfig) -> int:
    """Return the count of numbers that tensor parallelism leaves whole.

    They are norms, positions, and biases that are added once.
    """
    count = _norm_numbers(config) * config.norms
    count += config.context * config.dim if config.position == "learned" else 0
    count += _qk_norm_numbers(config) + _factors(config) + _smear_numbers(config)
    return count + (2 * config.layers * config.dim if config.bias else 0)


def _attention_flops(config: ModelConfig, length: int) -> float:
    return 4.0 * config.layers * config.heads * config.resolved_head_dim * length


def instants_of(layer: int) -> tuple[Instant, ...]:
    """Return when a block's activations are held.

    The backward pass has let go of all but the first block's.
    """
    return ("loss", "turn", "backward") if layer == 0 else ("loss", "turn")


def _logits_bytes(config: ModelConfig, tokens: int) -> float:
    """Return the fp32 bytes of log-probabilities, their gradient and the logits'.

    Where logits are capped, those of the tanh are added.

    Under bf16 the matmul's own are freed by then, and return once log-probabilities are freed.
    """
    return tokens * config.vocab * (4 if config.logit_cap else 3) * FP32


def holds_casts(ledger: Ledger) -> bool:
    """Return whether autocast holds the weights' casts at the head.

    It holds those of blocks that would not keep them.

    It holds them until the forward pass ends. A GPU's peak at the head comes after, unless the head
    makes its gradients while it goes forward.
    """
    return not ledger.sizes["on_gpu"] or "loss_forward" in ledger.sizes


def without_casts(ledger: Ledger, linears: Mapping[str, tuple[int, int]]) -> Ledger:
    """Return the ledger of blocks that keep no cast of these linears' weights.

    A line is not below nothing where something else left its casts out before.

    Args:
        ledger: of the plan so far.
        linears: (in, out) by name.
    """
    pieces = "mlp_piece" in ledger.memory and not holds_casts(ledger)  # which keep none
    taken = sum(i * o for n, (i, o) in linears.items() if not (pieces and n.startswith("mlp.")))
    for name, line in ledger.memory.items():
        if name.endswith("/weight_cast"):
            kept = replace(line, bytes=max(0.0, line.bytes - 2 * taken))
            ledger = ledger.with_line(name, kept)
    return ledger


def _work_bytes(config: ModelConfig, tokens: int, size: int) -> float:
    """Return the bytes of a block's backward pass at its widest.

    They are the stream's gradient and gate_up's.

    The activation's gradient is there too, in the place of the activation.
    """
    gates = 2 if config.gated else 1
    return size * tokens * (config.dim + gates * config.resolved_ffn)


def _final_norm_bytes(config: ModelConfig, tokens: int, size: int, device: str) -> float:
    """Return the bytes of the last norm's input and of its result.

    The input is in fp32 where one kernel reads it.

    An RMS norm that is composed of operations keeps the normalised values too, and under bf16 their
    product in fp32. It matters on one rank of many, which holds a part of all else.
    """
    if config.norm == "rms_norm" and device != "cuda":
        return (3 * size + (FP32 if size != FP32 else 0)) * tokens * config.dim
    return (FP32 + size) * tokens * config.dim


def _block_activations(
    config: ModelConfig, tokens: int, size: int, device: str
) -> dict[str, float]:
    """Return the bytes that one block keeps for its backward pass, by what they are."""
    width = config.resolved_head_dim
    q, kv, ffn = config.heads * width, config.resolved_kv_heads * width, config.resolved_ffn
    row = tokens * size
    gates = 2 if config.gated else 1
    # An RMS norm is a product of its input, its statistics and its weight: autograd keeps the
    # normalised values beside the result. Layer norm, and on a GPU both, is one kernel that keeps
    # its statistics. Under bf16 both keep an fp32 copy of their input in place of the input.
    alone = (config.norm != "rms_norm" or device == "cuda") and size == FP32
    norms = 2 * row * config.dim if alone else 4 * row * config.dim
    # A CPU composes an RMS norm of operations, and under bf16 their fp32 product is kept as well.
    composed = FP32 * tokens if device == "cpu" and size != FP32 else 0
    if config.norm == "rms_norm":
        norms += 2 * composed * config.dim
    if config.post_norms:  # each keeps what it normalises, and in half precision an fp32 copy
        norms *= 2
    lines = {
        "residual": 2 * row * config.dim,
        "norm": norms + 4 * FP32 * tokens,
        "qkv": row * (q + 2 * kv),
        "attention": row * q + tokens * config.heads * FP32,
        "gate_up": row * ffn * gates,
        "activation": row * ffn * gates,
    }
    # Queries that lie between the keys of several groups are copied out of the fused product.
    copied = q if 1 < config.resolved_kv_heads < config.heads else 0
    changed = config.position == "rope" or config.qk_norm
    lines["attention_input"] = row * (q + kv if changed else copied)
    if config.qk_norm:
        statistics = FP32 * tokens * (config.heads + config.resolved_kv_heads)
        kept_copy = row * copied if size == FP32 else 0
        wide = 0 if device == "cuda" and size == FP32 else FP32 * tokens + composed
        if not config.has_norm_weights:  # no product with weights needs what it multiplies
            wide = 0 if size == FP32 else FP32 * tokens
        lines["qk_norm"] = wide * (q + kv) + kept_copy + statistics
    return {name: float(count) for name, count in lines.items()}

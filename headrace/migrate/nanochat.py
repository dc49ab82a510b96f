"""Make a plan of a command that starts nanochat's `scripts/base_train.py`.

The options, their defaults and what is computed of them are those of that script and of
`nanochat/gpt.py` at github.com/karpathy/nanochat in 2026: width from depth, batch and steps from
the parameters (arXiv 2505.13738), rates by the root of the batch, and weight decay by the horizon
(arXiv 2405.13698). What the script has without an option, as its model, is added and said.
Parameters are counted without the gates of its value embeddings, a few of each million.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.migrate.draft import (
    Draft,
    KeyRule,
    always,
    flat,
    never,
    only_with,
    text_to,
    to,
)
from headrace.migrate.read import by_underscores, read_command

PROGRAM = "base_train"
DEFAULTS: Mapping[str, Any] = {
    "depth": 20,
    "aspect_ratio": 64,
    "head_dim": 128,
    "max_seq_len": 2048,
    "window_pattern": "SSSL",
    "num_iterations": -1,
    "target_flops": -1.0,
    "target_param_data_ratio": 12,
    "device_batch_size": 32,
    "total_batch_size": -1,
    "embedding_lr": 0.3,
    "unembedding_lr": 0.008,
    "weight_decay": 0.28,
    "matrix_lr": 0.02,
    "scalar_lr": 0.5,
    "warmup_steps": 40,
    "warmdown_ratio": 0.65,
    "final_lr_frac": 0.05,
    "eval_every": 250,
    "eval_tokens": 80 * 524_288,
    "save_every": -1,
}
"""Defaults of the script's options."""
VOCAB = 32_768
"""Entries of the tokenizer that `scripts/tok_train.py` makes."""
REFERENCE_DEPTH, REFERENCE_BATCH = 12, 1 << 19
"""Depth and tokens of a step at which nanochat's rates were tuned."""
REFERENCE_WIDTH = 768
BATCH_POWER = 0.383
"""Exponent by which the best batch grows with the tokens of a run (arXiv 2505.13738)."""
TEXT = "hf:karpathy/fineweb-edu-100b-shuffle"
MOST_DEPTH = 1000


@dataclass(frozen=True)
class ScaledRun:
    """Hold what the script computes of its options.

    Args:
        dim: features of the model.
        parameters: those of the blocks' matrices and of the output matrix.
        batch: tokens of a step.
        steps: of the run.
        rate: what learning rates are multiplied by, by the batch.
        decay: Muon's weight decay.
    """

    dim: int
    parameters: float
    batch: int
    steps: int
    rate: float
    decay: float

    @classmethod
    def of(cls, draft: Draft) -> "ScaledRun":
        """Compute the scale of a run, as the script does."""
        dim, parameters = _width(draft, _depth(draft)), _parameters(draft, _depth(draft))
        ratio = draft.number("target_param_data_ratio", 12)
        ratio = ratio if ratio > 0 else 12.0
        tokens, reference = ratio * parameters, ratio * _parameters(draft, REFERENCE_DEPTH)
        batch = draft.whole("total_batch_size", -1)
        if batch < 1:
            batch = 2 ** round(math.log2(REFERENCE_BATCH * (tokens / reference) ** BATCH_POWER))
        steps = draft.whole("num_iterations", -1)
        if steps < 1:
            steps = max(1, int(tokens // batch))
        rate = (batch / REFERENCE_BATCH) ** 0.5
        decay = draft.number("weight_decay") * rate * reference / tokens
        return cls(dim, parameters, batch, steps, rate, decay)


def _depth(draft: Draft) -> int:
    return min(MOST_DEPTH, max(1, draft.whole("depth", 20)))


def _width(draft: Draft, depth: int) -> int:
    """Return the features of a model of so many blocks: a multiple of a head's."""
    head = max(2, min(1 << 12, draft.whole("head_dim", 128)))
    wide = depth * max(1, min(1 << 12, draft.whole("aspect_ratio", 64)))
    return -(-wide // head) * head


def _parameters(draft: Draft, depth: int) -> float:
    """Return the parameters that the script's laws count: of matrices in blocks, and the head."""
    dim = _width(draft, depth)
    return 12.0 * depth * dim * dim + VOCAB * dim


def import_nanochat(file: Path, ranks: int) -> Draft:
    """Return the draft of a plan that says what a command of nanochat does.

    Args:
        file: a script or line with the command, a Python file that sets the options, or the JSON
            beside a checkpoint.
        ranks: processes that it was run on, where the command does not say.

    Raises:
        ConfigError: there is no such command.
    """
    options, started = read_command(file, PROGRAM)
    values = flat(by_underscores(options), str(file))
    values = {key: value for key, value in values.items() if not _is_variable(value)} | {
        key: value for key, value in values.items() if _is_variable(value)
    }
    draft = Draft("nanochat", values, DEFAULTS, max(started, ranks))
    for key, value in values.items():
        if _is_variable(value):
            draft.leave(key, "a variable of the shell: its value is not in the file")
    scale = ScaledRun.of(draft)
    _model(draft, scale)
    _batch(draft, scale)
    _rates(draft, scale)
    _always(draft)
    draft.follow(RULES)
    return draft


def _is_variable(value: Any) -> bool:
    return isinstance(value, str) and "$" in value


def _model(draft: Draft, scale: ScaledRun) -> None:
    """Set `model.*`: the width follows from the depth."""
    head = max(2, min(1 << 12, draft.whole("head_dim", 128)))
    depth = _depth(draft)
    draft.carry("depth", draft.put("model.layers", depth))
    draft.carry("aspect_ratio", draft.put("model.dim", scale.dim))
    draft.carry("head_dim", draft.put("model.heads", scale.dim // head))
    length = max(2, draft.whole("max_seq_len"))
    pattern = str(draft.value("window_pattern")).upper()
    full = pattern.find("L")
    if set(pattern) <= {"L"}:
        draft.idle("window_pattern", "every layer sees all before it")
    elif pattern == "S" * full + "L":
        words = draft.put("model.window", length // 2), draft.put("model.window_between", full)
        draft.carry("window_pattern", *words)
    else:
        why = "a plan repeats so many layers with a window, then one without"
        between = max(1, pattern.count("S") // max(1, pattern.count("L")))
        words = draft.put("model.window", length // 2), draft.put("model.window_between", between)
        draft.near("window_pattern", *words, why=why)
    for path, value in (
        *(("model.vocab", VOCAB), ("data.vocab", VOCAB), ("model.norm", "unit_rms_norm")),
        *(("model.activation", "relu2"), ("model.ffn", 4 * scale.dim), ("model.qk_norm", True)),
        *(("model.embedding_norm", True), ("model.embedding_residual", True)),
        *(("model.logit_cap", 15.0), ("model.output_init", "zero")),
    ):
        draft.need(path, value, "nanochat's model, which has no option for it")
    tables = depth // 4
    if tables:
        why = "nanochat has a table in every second block; a table here serves two blocks"
        draft.need("model.value_embeddings", tables, why)


def _batch(draft: Draft, scale: ScaledRun) -> None:
    """Set the tokens of a step, the rows of a pass, and the steps."""
    length, data = max(2, draft.whole("max_seq_len")), draft.ranks
    rows = max(1, scale.batch // (length * data)) * data
    micro = max(1, draft.whole("device_batch_size", 32))
    micro = min(micro, rows // data)
    while (rows // data) % micro:
        micro -= 1
    draft.need("mesh.data", data, "processes of the command, or --ranks")
    word = draft.put("batch.tokens", rows * length)
    if rows * length == scale.batch:
        draft.carry("total_batch_size", word)
    else:
        draft.near("total_batch_size", word, why=f"whole rows of {data} ranks")
    draft.carry("device_batch_size", draft.put("batch.micro_sequences", micro))
    word = draft.put("goal.steps", scale.steps)
    if draft.whole("num_iterations", -1) > 0:
        draft.carry("num_iterations", word)
        draft.idle("target_param_data_ratio", "num_iterations counts before it")
    elif draft.number("target_flops") > 0:
        draft.leave("target_flops", "goal.steps=N, or headrace plan --budget 3e19flops")
        draft.carry("target_param_data_ratio", word)
    else:
        draft.carry("target_param_data_ratio", word)


def _rates(draft: Draft, scale: ScaledRun) -> None:
    """Set rates: of the output matrix, and factors of it for embeddings and vectors."""
    narrow = (scale.dim / REFERENCE_WIDTH) ** -0.5
    head = draft.number("unembedding_lr") or 0.008
    rate = head * narrow * scale.rate
    draft.carry("unembedding_lr", draft.put("optimizer.lr", float(f"{rate:.6g}")))
    embedding = draft.number("embedding_lr") / head
    draft.carry("embedding_lr", draft.put("optimizer.lr_factors.embeddings", round(embedding, 6)))
    vectors = draft.number("scalar_lr") / (head * narrow)
    word = draft.put("optimizer.lr_factors.vectors", round(vectors, 6))
    draft.near("scalar_lr", word, why="nanochat divides one of the two kinds of scalars by 100")
    muon = draft.add(
        "muon",
        lr=float(f"{draft.number('matrix_lr') * scale.rate:.6g}"),
        weight_decay=float(f"{scale.decay:.6g}"),
        momentum=0.97,
        momentum_warmup_steps=400,
        cautious_decay=True,
        normalize_rows=True,
    )
    draft.near("matrix_lr", *muon, why="nanochat's momentum falls to 0.9 in the end, ours stays")
    decay = draft.add("weight_decay_schedule", shape="cosine", final=0.0)
    draft.carry("weight_decay", muon[2], *decay)


def _always(draft: Draft) -> None:
    """Add what the script has without an option."""
    why = "base_train has it without an option"
    for path, value in (
        *(("optimizer.betas", [0.8, 0.95]), ("optimizer.eps", 1e-10)),
        *(("optimizer.weight_decay", 0.0), ("optimizer.clip_norm", 0.0)),
        ("schedule.kind", "warmup_stable_decay"),
        ("techniques.torch_compile.mode", "default"),
    ):
        draft.need(path, value, why)
    draft.need("data.sources", TEXT, "nanochat downloads shards of its own; any text will do")


def _run(draft: Draft, key: str) -> None:
    name = str(draft.value(key))
    if name == "dummy":
        draft.idle(key, "nothing is sent to wandb")
    else:
        draft.carry(key, draft.put("track.to", ["wandb"]), draft.put("name", name))


def _every(path: str, otherwise: str) -> KeyRule:
    """Return a rule for a number of steps of which -1 means never, or at the end alone."""

    def rule(draft: Draft, key: str) -> None:
        steps = draft.whole(key)
        if steps > 0:
            draft.carry(key, draft.put(path, steps))
        else:
            draft.near(key, draft.put(path, draft.tables["goal"]["steps"]), why=otherwise)

    return rule


def _fp8(draft: Draft, key: str) -> None:
    if not draft.is_on(key):
        draft.idle(key)
        return
    recipe = str(draft.value("fp8_recipe", "tensorwise"))
    words = draft.add("float8_linear", recipe=recipe)
    draft.carry(key, *words)
    draft.carry("fp8_recipe", words[-1])


def _device(draft: Draft, key: str) -> None:
    draft.carry(key, draft.put("device", str(draft.value(key)) or "auto"))


_TASKS = "headrace eval RUN --tasks FILE asks questions of a run"
RULES: Mapping[str, KeyRule] = {
    "run": _run,
    "model_tag": text_to("name"),
    "device_type": _device,
    "fp8": _fp8,
    "fp8_recipe": only_with("fp8", always("float8_linear's recipe")),
    "max_seq_len": to("data.sequence_length"),
    "warmup_steps": to("schedule.warmup_steps"),
    "warmdown_ratio": to("schedule.decay_fraction"),
    "final_lr_frac": to("schedule.final_fraction"),
    "eval_every": _every("eval.every_steps", "a run always ends with an evaluation"),
    "eval_tokens": to("eval.tokens"),
    "save_every": _every("checkpoint.every_steps", "one checkpoint at the end"),
    "core_metric_every": never(_TASKS, -1, "-1"),
    "core_metric_max_per_task": never(_TASKS),
    "sample_every": never("headrace sample RUN continues a prompt", -1, "-1"),
    "resume_from_step": never("headrace train PLAN --resume", -1, "-1"),
    "target_flops": never("num_iterations or the ratio decides", -1, -1.0, "-1"),
}
"""What becomes of each option; `_model`, `_batch`, `_rates` and `_always` stand before."""

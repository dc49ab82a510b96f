"""What to change in a loop, in its own words: DataLoader, autocast, TrainingArguments, by symptom.

One function for each bottleneck and for each station of time that is none. What is asked for
already, as `headrace.watch` records it, is not advised again; where a number is recorded, the new
one stands beside it. A Trainer is told in the words of its TrainingArguments. What a row is worth
and which techniques of Headrace do the same is said by loop.py.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

PADDED = 0.02
"""Of the tokens, from which padding is worth a change."""
HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have a fused step."""


@dataclass(frozen=True)
class Loop:
    """What is known of a loop; without a report, as of a trace alone, next to nothing.

    Args:
        report: what `headrace.watch` saved.
    """

    report: Mapping[str, Any]

    def of(self, table: str, name: str) -> Any:
        """A fact in a table of the report; None where it was not read."""
        found = self.report.get(table)
        return found.get(name) if isinstance(found, Mapping) else None

    @property
    def trainer(self) -> bool:
        """Whether a Hugging Face Trainer runs it."""
        return self.report.get("trainer") is not None

    @property
    def cuda(self) -> bool:
        """Whether it trains on a GPU; a trace that can be judged was made on one."""
        return self.report.get("device", "cuda") == "cuda"

    @property
    def workers(self) -> int | None:
        """Processes that read; None where the loader is none of torch's, or unknown."""
        return self.of("loader", "num_workers")

    @property
    def half(self) -> bool:
        """Whether its products are known not to be of fp32."""
        mixed = self.report.get("autocast") or self.of("trainer", "bf16")
        narrow = self.report.get("dtype") in ("bfloat16", "float16")
        return bool(mixed or narrow or self.of("trainer", "fp16"))

    @property
    def compiled(self) -> bool:
        """Whether its model is known to be compiled."""
        made = self.of("compiler", "graphs") or self.report.get("compiled")
        return bool(made or self.of("trainer", "torch_compile"))

    @property
    def lr(self) -> float | None:
        """The highest learning rate of the steps that are kept."""
        rates = [row["lr"] for row in self.report.get("rows") or () if row.get("lr")]
        return max(rates, default=None)


@dataclass(frozen=True)
class Change:
    """A row of the tables below.

    Args:
        words: the change, in a loop of one's own.
        what: what it does.
        costs: what it costs.
        trainer: the change in the words of a Trainer, where they are others.
        symptom, like: the word of the techniques that do it, and what their line says.
        keys: of a plan, that do it.
        equality: of the gradients.
        share: what is forecast: this share in place of the finding's.
        part: what it helps with, where that is not all of the finding, and no share tells.
        left: of a step whose finding has such a share, what stays at least.
    """

    words: str
    what: str
    costs: str
    trainer: str = ""
    symptom: str = ""
    like: str = ""
    keys: tuple[str, ...] = ()
    equality: str = "exact"
    share: float | None = None
    part: str = ""
    left: Callable[[float], float] = lambda share: 0.0


# --- what takes time --------------------------------------------------------------------------


def _input(loop: Loop) -> list[Change]:
    workers, now, cores = loop.workers, loop.workers or 0, loop.report.get("cores")
    more = max(2, 2 * now) if cores is None else max(1, min(max(2, 2 * now), cores))
    instead = "" if workers is None else f" instead of {now}"
    found = []
    if more > now:
        own = loop.of("loader", "name") if workers is None else None
        inside = f"; {own} reads them inside of the loop" if own else ""
        on_cpu = "" if loop.cuda else ", which train as well on a CPU"
        found.append(Change(
            f"DataLoader(num_workers={more}){instead}",
            f"Reads batches in processes of their own while the step before is computed{inside}.",
            f"cores{on_cpu}, and memory of the host", symptom="input", keys=("data.workers",),
            left=lambda share: now / more if now else share / more,
            trainer=f"TrainingArguments(dataloader_num_workers={more}){instead}",
        ))  # fmt: skip
    if now:
        ahead = loop.of("loader", "prefetch_factor") or 2
        found.append(Change(
            f"DataLoader(prefetch_factor={2 * ahead}) instead of {ahead}",
            "Keeps more batches ready for when one takes longer to read.",
            "memory of the host", symptom="input", keys=("data.prefetch",),
            part="batches come late now and then, and not always",
            trainer=f"TrainingArguments(dataloader_prefetch_factor={2 * ahead}) instead of {ahead}",
        ))  # fmt: skip
    return [*found, *_copies(loop), *_once(loop)]


def _copies(loop: Loop) -> list[Change]:
    if not loop.cuda or loop.of("loader", "pin_memory"):
        return []
    return [Change(
        "DataLoader(pin_memory=True), batch.to(device, non_blocking=True)",
        "Copies batches to the GPU beside its work.", "page-locked memory of the host",
        trainer="TrainingArguments(dataloader_pin_memory=True)", symptom="input", like="copy",
        part="batches' copies are the cause",
    )]  # fmt: skip


def _once(loop: Loop) -> list[Change]:
    found = []
    if loop.workers and loop.of("loader", "persistent_workers") is False:
        found.append(Change(
            "DataLoader(persistent_workers=True)", "Starts its processes once, not every epoch.",
            "memory of the host between epochs", part="epochs' beginnings are the cause",
            trainer="TrainingArguments(dataloader_persistent_workers=True)",
        ))  # fmt: skip
    return [*found, Change(
        "tokenize and decode once, before training",
        "What a row costs is paid once and read from a memory-mapped file from then on.", "a disk",
        part="making rows, and not reading them, is the cause",
        trainer="dataset.map(tokenize, batched=True) before Trainer(train_dataset=dataset)",
    )]  # fmt: skip


def _wasted(loop: Loop) -> list[Change]:
    padding = loop.report.get("padding_fraction")
    if padding is not None and padding < PADDED:
        return [Change(
            "one row for a conversation, with targets in each of its answers",
            "A prompt that several rows repeat is computed once.", "longer rows",
            part="rows repeat their prompts: next to nothing is padding", equality="learning",
        )]  # fmt: skip
    part = "" if padding is not None or not loop.report else "it is padding"
    return [
        Change(
            "pack several short texts into a row, attention kept inside of each",
            "Rows without padding.", "a mask or a kernel that knows where a text ends",
            symptom="wasted tokens", equality="learning", share=padding, part=part,
            trainer="Trainer(data_collator=DataCollatorWithFlattening())",
        ),
        Change(
            "batches of rows of like length, each padded to its own longest",
            "A row is padded to its neighbours and not to the longest there is.",
            "an order by length: batches are drawn less freely, and shapes differ",
            equality="learning", share=padding, part=part,
            trainer='TrainingArguments(train_sampling_strategy="group_by_length") and a collator '
            "that pads to the longest row",
        ),
    ]  # fmt: skip


def _compile(loop: Loop, symptom: str) -> list[Change]:
    return [] if loop.compiled else [Change(
        "model = torch.compile(model)", "Fuses kernels, and launches fewer.",
        "seconds to minutes before the first step, and again for each new shape",
        trainer="TrainingArguments(torch_compile=True)", symptom=symptom, like="torch.compile",
    )]  # fmt: skip


def _launch(loop: Loop) -> list[Change]:
    found = _compile(loop, "launch")
    if loop.of("compiler", "graphs_after_warmup"):
        found.append(Change(
            "torch.compile(model, dynamic=True), or rows padded to a few lengths",
            "Few shapes, so that nothing is compiled again.", "work on padding",
            symptom="launch:compilation", like="lengths",
        ))  # fmt: skip
    if loop.of("compiler", "graph_breaks"):
        found.append(Change(
            "torch.compile(model, fullgraph=True)", "Its error names the line that breaks a graph.",
            "", trainer="torch.compile(model, fullgraph=True), once, by itself",
        ))  # fmt: skip
    if loop.cuda:
        found.append(Change(
            'torch.compile(model, mode="reduce-overhead")', "Launches a recorded graph at once.",
            "a pool that keeps the step's memory; shapes that do not change",
            trainer='TrainingArguments(torch_compile_mode="reduce-overhead")',
            symptom="launch", like="record",
        ))  # fmt: skip
    return [*found, *_unsynced(loop), *_fused(loop), Change(
        "more rows in a micro-batch", "More work for each launch.", "memory of activations",
        trainer="TrainingArguments(per_device_train_batch_size) up, gradient_accumulation_steps "
        "down", keys=("batch.micro_sequences",),
    )]  # fmt: skip


def _unsynced(loop: Loop) -> list[Change]:
    return [Change(
        "no .item(), .cpu() or print of a tensor in each step",
        "The host goes ahead of the device, instead of waiting for a number of it.",
        "numbers that are seen some steps later", trainer="TrainingArguments(logging_steps) up",
    )]  # fmt: skip


def _fused(loop: Loop) -> list[Change]:
    name = loop.of("optimizer", "name") or "AdamW"
    if loop.of("optimizer", "fused") or name not in HAS_FUSED:
        return []
    trainer = 'TrainingArguments(optim="adamw_torch_fused")' if name == "AdamW" else ""
    said = f"torch.optim.{name}(fused=True)"
    return [Change(said, "One kernel updates many parameters.", "", trainer=trainer)]


def _narrower(loop: Loop) -> list[Change]:
    if loop.half or not loop.cuda:
        return []
    found = [Change(
        'torch.autocast("cuda", dtype=torch.bfloat16)', "Products in bf16, weights in fp32.",
        "operands of 8 significant bits", trainer="TrainingArguments(bf16=True)",
        symptom="computation:products", like="bf16", equality="approximate",
        keys=("model.precision",),
    )]  # fmt: skip
    if loop.report.get("float32_matmul_precision", "highest") == "highest":
        found.append(Change(
            'torch.set_float32_matmul_precision("high")', "Products of fp32 on tensor cores.",
            "operands of 11 significant bits", trainer="TrainingArguments(tf32=True)",
            symptom="computation:products", like="multiply fp32", equality="approximate",
        ))  # fmt: skip
    return found


def _bandwidth(loop: Loop) -> list[Change]:
    liger = Change(
        "Liger's kernels in place of the model's own", "Fewer passes over the same numbers.",
        "a package of Triton kernels", trainer="TrainingArguments(use_liger_kernel=True)",
        symptom="memory bandwidth:elementwise", like="liger",
    )  # fmt: skip
    mine = _compile(loop, "memory bandwidth")
    return [*mine, *_narrower(loop), *_fused(loop), *([liger] if loop.cuda else [])]


def _kernels(loop: Loop) -> list[Change]:
    return [*_narrower(loop), Change(
        "torch.nn.functional.scaled_dot_product_attention", "Attention in one kernel.", "",
        trainer='from_pretrained(attn_implementation="sdpa")',
        symptom="kernel efficiency:attention",
    ), *_compile(loop, "memory bandwidth")]  # fmt: skip


def _interconnect(loop: Loop) -> list[Change]:
    return [Change(
        "with model.no_sync(): on all but a step's last micro-batch",
        "Gradients are summed over ranks once a step.", "memory of whole gradients",
        trainer="TrainingArguments(gradient_accumulation_steps) up",
    ), Change(
        "DistributedDataParallel(bucket_cap_mb=100)",
        "Fewer and larger transfers, beside the backward pass.", "memory of the buckets",
        trainer="TrainingArguments(ddp_bucket_cap_mb=100)",
    )]  # fmt: skip


def _straggler(loop: Loop) -> list[Change]:
    return [Change(
        "as many tokens for each rank in each step", "Ranks come to the end together.",
        "an order by length",
        trainer='TrainingArguments(train_sampling_strategy="group_by_length")',
    ), Change(
        "nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE where the last rank is",
        "Tells whether its GPU is held down.", "",
    )]  # fmt: skip


COOLER = Change(
    "nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE, then its cooling, power or set clocks",
    "The GPU runs at the clock that it can.",
    "",
)

# --- memory -----------------------------------------------------------------------------------


def _memory(loop: Loop) -> list[Change]:
    return [Change(
        "half as many rows in a micro-batch, two of them in a step", "Half of the activations.",
        "smaller products", keys=("batch.micro_sequences",),
        trainer="TrainingArguments(per_device_train_batch_size) halved, "
        "gradient_accumulation_steps doubled",
        symptom="memory capacity:activations", like="micro-batch that fits",
    ), Change(
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        "Keeps a block's input and computes the block again.", "the blocks' forward pass once more",
        trainer="TrainingArguments(gradient_checkpointing=True)",
        symptom="memory capacity:activations", like="run the block again",
    ), *_narrower(loop), Change(
        "an optimizer with 8-bit states", "A quarter of the optimizer's states.",
        "moments rounded to 8 bits", trainer='TrainingArguments(optim="adamw_bnb_8bit")',
        symptom="memory capacity:optimizer", like="8 bits", equality="learning",
    )]  # fmt: skip


def _pieces(loop: Loop) -> list[Change]:
    return [Change(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True", "Segments grow, and leave no gaps.",
        "slower first steps", symptom="fragmentation",
    )]  # fmt: skip


# --- what is wrong ----------------------------------------------------------------------------


def _unstable(loop: Loop) -> list[Change]:
    lr = "" if loop.lr is None else f"={loop.lr / 2:.4g}"
    now = " of half as much" if loop.lr is None else f" instead of {loop.lr:.4g}"
    found = [Change(
        f"lr{lr}{now}", "Smaller updates.", "another run: what was learned was at the old rate",
        trainer=f"TrainingArguments(learning_rate{lr}){now}", keys=("optimizer.lr",),
        equality="learning",
    )]  # fmt: skip
    clips = loop.of("trainer", "max_grad_norm") or loop.report.get("clip_rate") is not None
    if not clips:
        found.append(Change(
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
            "Large gradients shrink.", "one pass over the gradients", equality="learning",
            trainer="TrainingArguments(max_grad_norm=1.0)", keys=("optimizer.clip_norm",),
        ))  # fmt: skip
    return [*found, Change(
        "a longer warm-up: torch.optim.lr_scheduler.LinearLR", "A small rate while moments form.",
        "steps at a low rate", trainer="TrainingArguments(warmup_steps) up",
        keys=("schedule.warmup_steps",), equality="learning",
    ), Change(
        "a penalty on the log of the softmax's sum", "Logits cannot drift.", "a term of the loss",
        symptom="instability", like="normaliser", equality="learning",
    )]  # fmt: skip


def _no_op(loop: Loop) -> list[Change]:
    signals = loop.report.get("signals") or {}
    if signals.get("untrained_share"):
        return [Change(
            "print those of model.named_parameters() whose grad is None before optimizer.step()",
            "Names what no loss depends on: unused, detached, or frozen and in the optimizer.", "",
        )]  # fmt: skip
    return [Change(
        "call what torch.compile returned", "The model that was given to it is not compiled.", "",
        trainer="TrainingArguments(torch_compile=True), without a torch.compile of one's own",
    )]  # fmt: skip


# --- stations ---------------------------------------------------------------------------------


def _rarer_evaluation(loop: Loop) -> list[Change]:
    return [Change(
        "evaluate less often, or on fewer rows", "Fewer passes without an update.", "a rarer look",
        trainer="TrainingArguments(eval_steps) up", keys=("eval.every_steps",),
    )]  # fmt: skip


def _rarer_saves(loop: Loop) -> list[Change]:
    return [Change(
        "save less often", "Fewer copies of weights and optimizer to a disk.",
        "more steps to repeat after a crash", trainer="TrainingArguments(save_steps) up",
        keys=("checkpoint.every_steps",),
    ), Change(
        "save the weights without the optimizer", "A third of the bytes of AdamW.",
        "a resume begins with empty moments", trainer="TrainingArguments(save_only_model=True)",
    )]  # fmt: skip


def _between_steps(loop: Loop) -> list[Change]:
    """A Trainer tells its saving apart; of another loop it is part of what stands there."""
    saves = [] if loop.trainer else _rarer_saves(loop)[:1]
    return [*_unsynced(loop), *(replace(save, part="saving stands there") for save in saves)]


def _kept_graphs(loop: Loop) -> list[Change]:
    return [Change(
        "TORCHINDUCTOR_CACHE_DIR on a disk that stays", "Graphs are compiled once.", "disk",
        symptom="launch:compilation", like="disk",
    )]  # fmt: skip


def _less_work(loop: Loop) -> list[Change]:
    return [*_narrower(loop), *_compile(loop, "memory bandwidth")]


Table = Mapping[str, Callable[[Loop], list[Change]]]
BOTTLENECKS: Table = {
    "input": _input, "wasted tokens": _wasted, "launch": _launch, "interconnect": _interconnect,
    "straggler": _straggler, "memory bandwidth": _bandwidth, "kernel efficiency": _kernels,
    "computation": _less_work, "memory capacity": _memory, "fragmentation": _pieces,
    "instability": _unstable, "silent no-op": _no_op,
}  # fmt: skip
STATIONS: Table = {
    "forward and backward": _less_work,
    "optimizer": _fused, "between steps": _between_steps, "evaluation": _rarer_evaluation,
    "checkpointing": _rarer_saves, "compilation": _kept_graphs,
}  # fmt: skip
"""Where time went that no bottleneck names."""

"""List what to change in a loop, in its own words: DataLoader, autocast, TrainingArguments.

There is one function for each bottleneck and for each phase that is none. What is asked for
already, as `headrace.watch` records it, is not advised; where a number is recorded, the new one
stands beside it. A Trainer gets the words of its TrainingArguments. What a change is worth and
which techniques of Headrace do it is decided in loop_remedies.py.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace

from headrace.doctor.loop import Change, Loop
from headrace.doctor.observation import PADDED

HAS_FUSED = ("Adam", "AdamW", "SGD", "Adagrad")
"""Optimizers of torch that have a fused step."""
LoopChanges = Iterator[Change]

# --- what takes time --------------------------------------------------------------------------


def _input(loop: Loop) -> LoopChanges:
    workers, now, cores = loop.workers, loop.workers or 0, loop.report.get("cores")
    more = max(2, 2 * now) if cores is None else max(1, min(max(2, 2 * now), cores))
    instead = "" if workers is None else f" instead of {now}"
    if more > now:
        own = loop.of("loader", "name") if workers is None else None
        inside = f"; {own} reads them inside of the loop" if own else ""
        on_cpu = "" if loop.cuda else ", which train as well on a CPU"
        yield Change(
            f"DataLoader(num_workers={more}){instead}",
            f"Reads batches in processes of their own while the step before is computed{inside}.",
            f"cores{on_cpu}, and memory of the host",
            trainer=f"TrainingArguments(dataloader_num_workers={more}){instead}",
            symptom="input",
            keys=("data.workers",),
            left=lambda share: now / more if now else share / more,
        )
    if now:
        ahead = loop.of("loader", "prefetch_factor") or 2
        instead = f"{2 * ahead}) instead of {ahead}"
        yield Change(
            f"DataLoader(prefetch_factor={instead}",
            "Keeps more batches ready for when one takes longer to read.",
            "memory of the host",
            trainer=f"TrainingArguments(dataloader_prefetch_factor={instead}",
            symptom="input",
            keys=("data.prefetch",),
            part="batches come late now and then, and not always",
        )
    yield from _copies(loop)
    yield from _once(loop)


def _copies(loop: Loop) -> LoopChanges:
    if loop.cuda and not loop.of("loader", "pin_memory"):
        yield Change(
            "DataLoader(pin_memory=True), batch.to(device, non_blocking=True)",
            "Copies batches to the GPU beside its work.",
            "page-locked memory of the host",
            trainer="TrainingArguments(dataloader_pin_memory=True)",
            same="pinned copies",
            part="batches' copies are the cause",
        )


def _once(loop: Loop) -> LoopChanges:
    if loop.workers and loop.of("loader", "persistent_workers") is False:
        yield Change(
            "DataLoader(persistent_workers=True)",
            "Starts its processes once, not every epoch.",
            "memory of the host between epochs",
            trainer="TrainingArguments(dataloader_persistent_workers=True)",
            part="epochs' beginnings are the cause",
        )
    yield Change(
        "tokenize and decode once, before training",
        "What a row costs is paid once and read from a memory-mapped file from then on.",
        "a disk",
        trainer="dataset.map(tokenize, batched=True) before Trainer(train_dataset=dataset)",
        part="making rows, and not reading them, is the cause",
    )


def _wasted(loop: Loop) -> LoopChanges:
    padding = loop.report.get("padding_fraction")
    if padding is not None and padding < PADDED:
        yield Change(
            "one row for a conversation, with targets in each of its answers",
            "A prompt that several rows repeat is computed once.",
            "longer rows",
            part="rows repeat their prompts: next to nothing is padding",
            equality="learning",
        )
        return
    part = "" if padding is not None or not loop.report else "it is padding"
    yield Change(
        "pack several short texts into a row, attention kept inside of each",
        "Rows without padding.",
        "a mask or a kernel that knows where a text ends",
        trainer="Trainer(data_collator=DataCollatorWithFlattening())",
        symptom="wasted tokens",
        equality="learning",
        share=padding,
        part=part,
    )
    yield Change(
        "batches of rows of like length, each padded to its own longest",
        "A row is padded to its neighbours and not to the longest there is.",
        "an order by length: batches are drawn less freely, and shapes differ",
        trainer='TrainingArguments(train_sampling_strategy="group_by_length") and a collator '
        "that pads to the longest row",
        equality="learning",
        share=padding,
        part=part,
    )


def _compile(loop: Loop) -> LoopChanges:
    if not loop.compiled:
        yield Change(
            "model = torch.compile(model)",
            "Fuses kernels, and launches fewer.",
            "seconds to minutes before the first step, and again for each new shape",
            trainer="TrainingArguments(torch_compile=True)",
            same="torch.compile",
        )


def _launch(loop: Loop) -> LoopChanges:
    yield from _compile(loop)
    if loop.of("compiler", "graphs_after_warmup"):
        yield Change(
            "torch.compile(model, dynamic=True), or rows padded to a few lengths",
            "Few shapes, so that nothing is compiled again.",
            "work on padding",
            same="few shapes",
        )
    if loop.of("compiler", "graph_breaks"):
        yield Change(
            "torch.compile(model, fullgraph=True)",
            "Its error names the line that breaks a graph.",
            "",
            trainer="torch.compile(model, fullgraph=True), once, by itself",
        )
    if loop.cuda:
        yield Change(
            'torch.compile(model, mode="reduce-overhead")',
            "Launches a recorded graph at once.",
            "a pool that keeps the step's memory; shapes that do not change",
            trainer='TrainingArguments(torch_compile_mode="reduce-overhead")',
            same="recorded graphs",
        )
    yield from _unsynced(loop)
    yield from _fused(loop)
    yield Change(
        "more rows in a micro-batch",
        "More work for each launch.",
        "memory of activations",
        trainer="TrainingArguments(per_device_train_batch_size) up, gradient_accumulation_steps "
        "down",
        keys=("batch.micro_sequences",),
    )


def _unsynced(loop: Loop) -> LoopChanges:
    yield Change(
        "no .item(), .cpu() or print of a tensor in each step",
        "The host goes ahead of the device, instead of waiting for a number of it.",
        "numbers that are seen some steps later",
        trainer="TrainingArguments(logging_steps) up",
    )


def _fused(loop: Loop) -> LoopChanges:
    name = loop.of("optimizer", "name") or "AdamW"
    if not loop.of("optimizer", "fused") and name in HAS_FUSED:
        yield Change(
            f"torch.optim.{name}(fused=True)",
            "One kernel updates many parameters.",
            "",
            trainer='TrainingArguments(optim="adamw_torch_fused")' if name == "AdamW" else "",
        )


def _narrower(loop: Loop) -> LoopChanges:
    if loop.half or not loop.cuda:
        return
    yield Change(
        'torch.autocast("cuda", dtype=torch.bfloat16)',
        "Products in bf16, weights in fp32.",
        "operands of 8 significant bits",
        trainer="TrainingArguments(bf16=True)",
        same="bf16 autocast",
        equality="approximate",
        keys=("model.precision",),
    )
    if loop.report.get("float32_matmul_precision", "highest") == "highest":
        yield Change(
            'torch.set_float32_matmul_precision("high")',
            "Products of fp32 on tensor cores.",
            "operands of 11 significant bits",
            trainer="TrainingArguments(tf32=True)",
            same="tf32 matmuls",
            equality="approximate",
        )


def _bandwidth(loop: Loop) -> LoopChanges:
    yield from _less_work(loop, compile_first=True)
    yield from _fused(loop)
    if loop.cuda:
        yield Change(
            "Liger's kernels in place of the model's own",
            "Fewer passes over the same numbers.",
            "a package of Triton kernels",
            trainer="TrainingArguments(use_liger_kernel=True)",
            same="Liger kernels",
        )


def _kernels(loop: Loop) -> LoopChanges:
    yield from _narrower(loop)
    yield Change(
        "torch.nn.functional.scaled_dot_product_attention",
        "Attention in one kernel.",
        "",
        trainer='from_pretrained(attn_implementation="sdpa")',
        symptom="kernel efficiency:attention",
    )
    yield from _compile(loop)


def _interconnect(loop: Loop) -> LoopChanges:
    yield Change(
        "with model.no_sync(): on all but a step's last micro-batch",
        "Gradients are summed over ranks once a step.",
        "memory of whole gradients",
        trainer="TrainingArguments(gradient_accumulation_steps) up",
    )
    yield Change(
        "DistributedDataParallel(bucket_cap_mb=100)",
        "Fewer and larger transfers, beside the backward pass.",
        "memory of the buckets",
        trainer="TrainingArguments(ddp_bucket_cap_mb=100)",
    )


def _straggler(loop: Loop) -> LoopChanges:
    yield Change(
        "as many tokens for each rank in each step",
        "Ranks come to the end together.",
        "an order by length",
        trainer='TrainingArguments(train_sampling_strategy="group_by_length")',
    )
    yield Change(
        "nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE where the last rank is",
        "Tells whether its GPU is held down.",
        "",
    )


COOLER = Change(
    "nvidia-smi -q -d CLOCK,TEMPERATURE,PERFORMANCE, then its cooling, power or set clocks",
    "The GPU runs at the clock that it can.",
    "",
)
"""What helps a GPU whose clock is lower than it need be."""

# --- memory -----------------------------------------------------------------------------------


def _memory(loop: Loop) -> LoopChanges:
    yield Change(
        "half as many rows in a micro-batch, two of them in a step",
        "Half of the activations.",
        "smaller products",
        trainer="TrainingArguments(per_device_train_batch_size) halved, "
        "gradient_accumulation_steps doubled",
        same="smaller micro-batches",
        keys=("batch.micro_sequences",),
    )
    yield Change(
        "torch.utils.checkpoint.checkpoint(block, x, use_reentrant=False)",
        "Keeps a block's input and computes the block again.",
        "the blocks' forward pass once more",
        trainer="TrainingArguments(gradient_checkpointing=True)",
        same="recomputed blocks",
    )
    yield from _narrower(loop)
    yield Change(
        "an optimizer with 8-bit states",
        "A quarter of the optimizer's states.",
        "moments rounded to 8 bits",
        trainer='TrainingArguments(optim="adamw_bnb_8bit")',
        same="8-bit states",
        equality="learning",
    )


def _pieces(loop: Loop) -> LoopChanges:
    yield Change(
        "PYTORCH_CUDA_ALLOC_CONF=expandable_segments:True",
        "Segments grow, and leave no gaps.",
        "slower first steps",
        symptom="fragmentation",
    )


# --- what is wrong ----------------------------------------------------------------------------


def _unstable(loop: Loop) -> LoopChanges:
    lr = "" if loop.lr is None else f"={loop.lr / 2:.4g}"
    now = " of half as much" if loop.lr is None else f" instead of {loop.lr:.4g}"
    yield Change(
        f"lr{lr}{now}",
        "Smaller updates.",
        "another run: what was learned was at the old rate",
        trainer=f"TrainingArguments(learning_rate{lr}){now}",
        keys=("optimizer.lr",),
        equality="learning",
    )
    clips = loop.of("trainer", "max_grad_norm") or loop.report.get("clip_rate") is not None
    if not clips:
        yield Change(
            "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0) before optimizer.step()",
            "Large gradients shrink.",
            "one pass over the gradients",
            trainer="TrainingArguments(max_grad_norm=1.0)",
            keys=("optimizer.clip_norm",),
            equality="learning",
        )
    yield Change(
        "a longer warm-up: torch.optim.lr_scheduler.LinearLR",
        "A small rate while moments form.",
        "steps at a low rate",
        trainer="TrainingArguments(warmup_steps) up",
        keys=("schedule.warmup_steps",),
        equality="learning",
    )
    yield Change(
        "a penalty on the log of the softmax's sum",
        "Logits cannot drift.",
        "a term of the loss",
        same="log-sum-exp penalty",
        equality="learning",
    )


def _no_op(loop: Loop) -> LoopChanges:
    signals = loop.report.get("signals") or {}
    if signals.get("untrained_share"):
        yield Change(
            "print those of model.named_parameters() whose grad is None before optimizer.step()",
            "Names what no loss depends on: unused, detached, or frozen and in the optimizer.",
            "",
        )
        return
    yield Change(
        "call what torch.compile returned",
        "The model that was given to it is not compiled.",
        "",
        trainer="TrainingArguments(torch_compile=True), without a torch.compile of one's own",
    )


# --- phases -----------------------------------------------------------------------------------


def _rarer_evaluation(loop: Loop) -> LoopChanges:
    yield Change(
        "evaluate less often, or on fewer rows",
        "Fewer passes without an update.",
        "a rarer look",
        trainer="TrainingArguments(eval_steps) up",
        keys=("eval.every_steps",),
    )


def _rarer_saves(loop: Loop) -> LoopChanges:
    yield Change(
        "save less often",
        "Fewer copies of weights and optimizer to a disk.",
        "more steps to repeat after a crash",
        trainer="TrainingArguments(save_steps) up",
        keys=("checkpoint.every_steps",),
    )
    yield Change(
        "save the weights without the optimizer",
        "A third of the bytes of AdamW.",
        "a resume begins with empty moments",
        trainer="TrainingArguments(save_only_model=True)",
    )


def _between_steps(loop: Loop) -> LoopChanges:
    """Yield rarer saves too, but for a Trainer, which reports its saving apart."""
    yield from _unsynced(loop)
    if not loop.trainer:
        yield replace(next(_rarer_saves(loop)), part="saving stands there")


def _kept_graphs(loop: Loop) -> LoopChanges:
    yield Change(
        "TORCHINDUCTOR_CACHE_DIR on a disk that stays",
        "Graphs are compiled once.",
        "disk",
        same="kept compiled code",
    )


def _less_work(loop: Loop, *, compile_first: bool = False) -> LoopChanges:
    first, second = (_compile, _narrower) if compile_first else (_narrower, _compile)
    yield from first(loop)
    yield from second(loop)


ChangesTable = Mapping[str, Callable[[Loop], LoopChanges]]
OF_BOTTLENECKS: ChangesTable = {
    "input": _input,
    "wasted tokens": _wasted,
    "launch": _launch,
    "interconnect": _interconnect,
    "straggler": _straggler,
    "memory bandwidth": _bandwidth,
    "kernel efficiency": _kernels,
    "computation": _less_work,
    "memory capacity": _memory,
    "fragmentation": _pieces,
    "instability": _unstable,
    "silent no-op": _no_op,
}
"""Bottleneck -> the changes that help with it."""
OF_PHASES: ChangesTable = {
    "forward and backward": _less_work,
    "optimizer": _fused,
    "between steps": _between_steps,
    "evaluation": _rarer_evaluation,
    "checkpointing": _rarer_saves,
    "compilation": _kept_graphs,
}
"""Phase in which time went that no bottleneck names -> the changes that shorten it."""

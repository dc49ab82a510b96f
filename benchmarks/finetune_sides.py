"""Make the sides that finetune.py compares: one model, one packed batch, one process a side.

The model is a folder of safetensors with random weights, drawn on the device and written once; each
side opens it by its own loader. The batch is packed: rows of whole documents end to end. Headrace
masks documents. A peer whose attention is not told of documents computes plain causal rows, which
is less work for its kernels than a mask, and each row says which it was.

A peer is its model and its adapters in the plainest loop, as its trainer sets them up: PEFT on
transformers with Liger's kernels is what trl's SFTTrainer runs, without the trainer's own time.
"""

import json
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import numpy as np
import receipts
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from variants import Variant

from headrace.assemble.build import make_build
from headrace.assemble.context import choose_device
from headrace.data.prepared import Prepared
from headrace.data.rows import Row
from headrace.model.adapter import links, load_pretrained
from headrace.model.hf_config import config_to_hf
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Stage
from headrace.train import train
from headrace.tuner.readings import flags_of, why

WARM_STEPS, TIMED_STEPS = 3, 6
PAD, PAD_ID = "<pad>", 1
"""Another token than the end, as Unsloth's loader wants it; no step uses it."""
SHORTEST = 64
"""Tokens of the shortest document of the batch; the mean is a quarter of a row."""
SHARED = "+chunked_cross_entropy +document_packing "
KERNELS = (
    "+torch_compile techniques.torch_compile.scope=block +bf16_parameters +varlen_attention "
    "+fused_swiglu "
)
"""What of Headrace's side runs on a GPU alone."""
TINY_CHUNK = "techniques.chunked_cross_entropy.chunk_tokens=32 "
OURS = {
    "headrace": "+selective_checkpoint",
    "headrace_half": "+selective_checkpoint techniques.selective_checkpoint.every=2",
    "headrace_kept": "",
    "headrace_whole": "+selective_checkpoint techniques.qlora.whole_blocks=26",
    "headrace_autotuned": "+selective_checkpoint techniques.qlora.whole_blocks=26 "
    "techniques.torch_compile.mode=max-autotune-no-cudagraphs",
    "headrace_small": "+full_checkpoint",
}
"""Side -> changes of the shape's plan beside the shared ones: what blocks keep, and what of their
frozen weights is held whole."""
WHOLE = ("headrace_whole", "headrace_autotuned")
"""Sides of QLoRA alone."""
NEEDS = {
    "peft": ("transformers", "peft"),
    "peft_liger": ("transformers", "peft", "liger_kernel"),
    "peft_liger_kept": ("transformers", "peft", "liger_kernel"),
    "unsloth": ("unsloth",),
}
"""Peer -> the packages that it needs; QLoRA needs bitsandbytes beside."""
PACKAGES = ("transformers", "peft", "liger_kernel", "bitsandbytes", "unsloth", "trl")
"""Packages whose versions a row tells."""


def missing(side: str, method: str) -> list[str]:
    """Return the packages of a side that are not installed."""
    needs = [*NEEDS.get(side, ())]
    if needs and method == "qlora":
        needs.append("bitsandbytes")
    return [name for name in needs if find_spec(name) is None]


# --- the model and the batch -----------------------------------------------------------------


def write_model(folder: Path, plan: Plan) -> Path:
    """Write a folder of random bf16 weights of the plan's shape, unless it is there.

    A block's weights are one file, so the host holds no more than these.

    Raises:
        SystemExit: the folder holds another model.
    """
    device, config = choose_device(plan), plan.model
    described = config_to_hf(config, sequence_length=plan.data.sequence_length, end_id=0)
    described |= {"torch_dtype": "bfloat16", "pad_token_id": PAD_ID}
    shape = {key: one for key, one in described.items() if key != "max_position_embeddings"}
    drawn = {"init_std": config.init_std, "seed": plan.seed, "device": device.type}
    receipts.claim(folder, shape=shape, **drawn)
    if (folder / "config.json").exists():
        return folder
    draw = torch.Generator(device).manual_seed(plan.seed)
    index: dict[str, str] = {}
    parts: dict[str, dict[str, Tensor]] = {}
    every = links(config)
    for number, link in enumerate(every):
        value = torch.empty(link.shape, dtype=torch.bfloat16, device=device)
        if len(link.shape) == 1:
            value.fill_(1.0)
        else:
            value.normal_(0.0, config.init_std, generator=draw)
        part = ".".join(link.ours.split(".")[:2])
        tensors = parts.setdefault(part, {})
        tensors |= {name: tensor.cpu() for name, tensor in link.to_theirs(value).items()}
        last = number + 1 == len(every)
        if last or ".".join(every[number + 1].ours.split(".")[:2]) != part:
            file = f"model-{part}.safetensors"
            save_file(parts.pop(part), folder / file, metadata={"format": "pt"})
            index |= dict.fromkeys(tensors, file)
    text = json.dumps({"metadata": {}, "weight_map": index})
    (folder / "model.safetensors.index.json").write_text(text)
    _write_tokenizer(folder, config.vocab)
    (folder / "config.json").write_text(json.dumps(described))  # last: the folder is whole
    if device.type == "cuda":
        torch.cuda.empty_cache()  # the sides' processes need it
    return folder


def _write_tokenizer(folder: Path, vocab: int) -> None:
    """Write a tokenizer of as many words, which a peer's loader asks for and no step uses."""
    from tokenizers import Tokenizer
    from tokenizers.models import WordLevel

    words = {PAD if number == PAD_ID else f"w{number}": number for number in range(vocab)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="w0"))
    tokenizer.add_special_tokens([PAD])
    tokenizer.save(str(folder / "tokenizer.json"))
    facts = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0", "pad_token": PAD}
    (folder / "tokenizer_config.json").write_text(json.dumps(facts))


@dataclass(frozen=True)
class PackedBatch:
    """A packed batch is the rows of one step, the same for each side; it is a `Packer`.

    Args:
        ids: int64 [rows, length + 1].
        starts: where documents begin in each row.
    """

    ids: np.ndarray
    starts: tuple[np.ndarray, ...]

    @staticmethod
    def drawn(rows: int, length: int, vocab: int, seed: int) -> "PackedBatch":
        """Draw documents of `SHORTEST` tokens and more until they fill the rows."""
        draw = np.random.default_rng(seed)
        shortest = min(SHORTEST, max(1, length // 8))
        starts = []
        for _ in range(rows):
            sizes = shortest + draw.exponential(length / 4 - shortest, length // shortest + 1)
            places = np.cumsum(sizes.astype(np.int64))
            starts.append(np.concatenate([[0], places[places < length]]))
        return PackedBatch(draw.integers(0, vocab, (rows, length + 1)), tuple(starts))

    @property
    def sequence_length(self) -> int:
        """Return the tokens of a row."""
        return self.ids.shape[1] - 1

    @property
    def units(self) -> tuple[int, ...]:
        """Return how many rows it has."""
        return (len(self.ids),)

    def row(self, source: int, unit: int) -> Row:
        """Return row `unit`."""
        return Row(self.ids[unit], self.starts[unit])


# --- what a side's process does --------------------------------------------------------------


@dataclass(frozen=True)
class Loaded:
    """Hold a side that is ready to train.

    Args:
        step: takes one optimizer step and returns its loss, on the device.
        device: where it trains.
        facts: what a row tells of it.
    """

    step: Callable[[], Tensor]
    device: torch.device
    facts: dict[str, Any]


def headrace(side: str, method: str, plan: Plan, folder: Path) -> Loaded:
    """Build Headrace's side, as a run of `finetune` builds it from a folder."""
    vocab = load_pretrained(folder)[0].vocab  # a plan leaves it to its weights
    batch = batch_of(plan, vocab)
    tokenizer: Any = SimpleNamespace(vocab=vocab)
    nothing: Any = None
    prepared = Prepared(folder, tokenizer, (), nothing, fingerprint={}, has_begun=True)
    device = choose_device(plan)
    build = make_build(plan, prepared, World(), device, until=Stage.SCHEDULE)
    build.loader = build.transport(build, batch)
    flags_of(build).__enter__()  # the process ends with the side
    taken = iter(range(1 << 30))

    def step() -> Tensor:
        index = next(taken)
        return train.step(build, build.loader.step(index).micros, index)[0]

    trained = sum(p.numel() for p in build.model.parameters() if p.requires_grad)
    return Loaded(step, device, {"trained": trained, "mask": "documents"})


def batch_of(plan: Plan, vocab: int) -> PackedBatch:
    """Return the batch of a plan, in tokens below `vocab`."""
    return PackedBatch.drawn(plan.rows_per_step, plan.data.sequence_length, vocab, plan.seed)


def peft(side: str, method: str, plan: Plan, folder: Path) -> Loaded:
    """Build PEFT on transformers, with Liger's kernels where the side's name says so."""
    from peft import LoraConfig, get_peft_model  # pyright: ignore[reportMissingImports]
    from transformers import AutoModelForCausalLM, BitsAndBytesConfig

    device = choose_device(plan)
    how: dict[str, Any] = {"dtype": torch.bfloat16, "attn_implementation": "sdpa"}
    if method == "qlora":
        how["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model: Any = AutoModelForCausalLM.from_pretrained(folder, device_map={"": device}, **how)
    if "liger" in side:
        from liger_kernel.transformers import (  # pyright: ignore[reportMissingImports]
            apply_liger_kernel_to_llama,
        )

        apply_liger_kernel_to_llama(model=model)
    model.config.use_cache = False
    knobs: Any = plan.techniques[method]
    adapters = LoraConfig(
        r=knobs.rank, lora_alpha=knobs.alpha, target_modules="all-linear", task_type="CAUSAL_LM"
    )
    model = get_peft_model(model, adapters)
    if not side.endswith("kept"):  # the default of trl's SFTConfig
        model.gradient_checkpointing_enable({"use_reentrant": False})
        model.enable_input_require_grads()
    if method == "qlora":  # as SFTTrainer has it
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.data = parameter.data.to(torch.bfloat16)
    return _looped(model, plan, device)


def unsloth(side: str, method: str, plan: Plan, folder: Path) -> Loaded:
    """Build Unsloth's model and adapters, with its own checkpointing."""
    from unsloth import FastLanguageModel  # type: ignore[import-not-found]

    model, _ = FastLanguageModel.from_pretrained(
        str(folder),
        max_seq_length=plan.data.sequence_length,
        dtype=torch.bfloat16,
        load_in_4bit=method == "qlora",
        local_files_only=True,
    )
    knobs: Any = plan.techniques[method]
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    model = FastLanguageModel.get_peft_model(
        model,
        r=knobs.rank,
        lora_alpha=knobs.alpha,
        target_modules=list(names),
        lora_dropout=0,
        bias="none",
        use_gradient_checkpointing="unsloth",
    )
    FastLanguageModel.for_training(model)
    return _looped(model, plan, choose_device(plan))


def _looped(model: nn.Module, plan: Plan, device: torch.device) -> Loaded:
    """Return a peer's side: its model, fused AdamW, bf16 autocast and clipping."""
    model.train()
    trained = [p for p in model.parameters() if p.requires_grad]
    fused = device.type == "cuda"
    optimizer = torch.optim.AdamW(trained, lr=plan.optimizer.lr, weight_decay=0.0, fused=fused)
    ids = torch.from_numpy(batch_of(plan, plan.model.vocab).ids[:, :-1]).to(device)

    def step() -> Tensor:
        with torch.autocast(device.type, torch.bfloat16):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(trained, plan.optimizer.clip_norm)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return Loaded(step, device, {"trained": sum(p.numel() for p in trained), "mask": "causal"})


MAKERS: dict[str, Callable[[str, str, Plan, Path], Loaded]] = {
    **dict.fromkeys(OURS, headrace),
    **dict.fromkeys(("peft", "peft_liger", "peft_liger_kept"), peft),
    "unsloth": unsloth,
}


@dataclass(frozen=True)
class SideAsked:
    """Say which side is wanted, and of what."""

    side: str
    method: str
    plan: Plan
    folder: Path


def asked_of(text: str) -> SideAsked:
    """Return what a line of JSON asks for; finetune.py writes it."""
    asked = json.loads(text)
    side, method, more = asked["side"], asked["method"], asked["more"]
    if side in OURS:
        more = [*more, f"model.pretrained='{asked['folder']}'"]
    plan = plan_of(side, method, Path(asked["plan"]), more, tiny=asked["tiny"])
    return SideAsked(side, method, plan, Path(asked["folder"]))


def load(asked: SideAsked) -> Loaded:
    """Return the side, ready to train."""
    return MAKERS[asked.side](asked.side, asked.method, asked.plan, asked.folder)


def serve(asked: SideAsked) -> None:
    """Answer every line of the standard input with a reading, as one line of JSON."""
    loaded: Loaded | None = None
    for _ in sys.stdin:
        try:
            loaded = loaded or load(asked)
            answer = read(loaded, asked.plan.batch.tokens)
        except Exception as error:
            print(json.dumps({"failed": why(error)}), flush=True)
            raise
        print(json.dumps(answer), flush=True)


def read(loaded: Loaded, tokens: int) -> dict[str, Any]:
    """Return one reading: the median of timed steps after warm ones, and their peak."""
    cuda, seconds = loaded.device.type == "cuda", []
    first = None
    for index in range(WARM_STEPS + TIMED_STEPS):
        if index == WARM_STEPS and cuda:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
        began_s = time.perf_counter()
        loss = loaded.step()
        if cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began_s)
        first = float(loss) if first is None else first
    peak = torch.cuda.max_memory_allocated() if cuda else None
    if cuda:
        torch.cuda.empty_cache()  # the other sides need it meanwhile
    rate = tokens / median(seconds[WARM_STEPS:])
    return {"tokens_per_s": rate, "peak_bytes": peak, "first_loss": first, **loaded.facts}


def plan_of(side: str, method: str, path: Path, more: list[str], *, tiny: bool) -> Plan:
    """Return the plan of a side; a peer takes its shape, batch and adapters from it."""
    shared = f"{SHARED}{TINY_CHUNK if tiny else KERNELS}"
    ours = f"{shared}{OURS[side]}" if side in OURS else ""
    return Variant.parse(f"{side}: +{method} {ours}", {}).of(path, more)


if __name__ == "__main__":
    serve(asked_of(sys.argv[1]))

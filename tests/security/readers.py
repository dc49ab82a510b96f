"""Every reader of a file that a user brings, with a valid file for each.

The tests of this folder and `benchmarks/reliability.py` share it. A reader may give what it read,
or raise an error that is shown as one message; anything else is a fault.
"""

import atexit
import bz2
import gzip
import hashlib
import json
import shutil
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import torch
import zstandard
from safetensors import safe_open
from safetensors.torch import save_file
from security.served import served, tuning
from tiny import PLAN, save_weights, write_corpus
from tiny_gguf import model, write

from headrace.cli.catalogue import catalogue
from headrace.core.errors import MALFORMED, HeadraceError
from headrace.core.files import read_plan_text
from headrace.costs.machine import Machine
from headrace.data.chat.template import CHATML_TEXT, ChatTemplate, TemplateRefused
from headrace.data.ingest import prepare
from headrace.data.manifest import Manifest
from headrace.data.shards import Shards
from headrace.data.sources import read_documents
from headrace.data.tokenizer import Tokenizer, open_tokenizer
from headrace.doctor.run import diagnose
from headrace.export.llama_cpp import _fields, _origin, _quantized
from headrace.migrate.axolotl import import_axolotl
from headrace.migrate.litgpt import import_litgpt
from headrace.migrate.nanochat import import_nanochat
from headrace.migrate.torchtitan import import_torchtitan
from headrace.model.adapter import load_pretrained
from headrace.model.peft import read_adapters
from headrace.plan.plan import Plan
from headrace.report.single import write_report
from headrace.train.checkpoint import Saved, _sealed
from headrace.train.train import run as train

CONFIGS = Path(__file__).parents[1] / "migrate" / "configs"
FINE = (HeadraceError, TemplateRefused)
"""Errors that are shown as one message, or made into one where a template is read."""


@dataclass(frozen=True)
class Reader:
    """Hold one kind of file: how a valid one is made, and what reads it."""

    name: str
    make: Callable[[Path], Path]
    """write a valid file into a folder, and return the one that is spoiled"""
    read: Callable[[Path], Any]
    """read the spoiled file; it may be one of several in its folder"""
    values: str = ""
    """"json", "jsonl", "toml" or "safetensors", where values of it are replaced too"""
    sealed: Callable[[Path], Any] = lambda file: None
    """make digests anew that a spoiled value would be recognised by"""


def outcome(reader: Reader, file: Path) -> str:
    """Read a file; return "read" or "refused". Any other error is a fault, and goes through."""
    try:
        reader.read(file)
    except FINE:
        return "refused"
    return "read"


# ---- text -----------------------------------------------------------------------------------

ROWS = [{"text": f"The mill {n} grinds corn.", "n": n, "tags": ["a", {"b": n}]} for n in range(20)]
TALKS = [
    {"messages": [{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "yes"}]}
    for n in range(40)
]


def _written(name: str, content: bytes | str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        file = folder / name
        file.write_bytes(content.encode() if isinstance(content, str) else content)
        return file

    return make


def _lines(rows: list[dict[str, Any]]) -> str:
    return "".join(json.dumps(row) + "\n" for row in rows)


def _parquet(folder: Path) -> Path:
    rows = [{"text": row["text"], "n": row["n"]} for row in ROWS]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), file := folder / "x.parquet")
    return file


def _documents(file: Path) -> list[Any]:
    return [*read_documents(str(file))]


def _talks(file: Path) -> Any:
    chat = {"kind": "auto", "template": "chatml"}
    tokenizer = str(_run_folder() / "tokenizer.json")
    more = {"sources": str(file), "chat": chat, "tokenizer": tokenizer, "validation": 0.3}
    shutil.rmtree(file.parent / "prepared", ignore_errors=True)
    return prepare(_plan(file.parent, data=more))


def _texts() -> Iterator[Reader]:
    lines = _lines(ROWS)
    table = "text,n\n" + "".join(f"the mill {n} grinds,{n}\n" for n in range(30))
    for name, content, values in (
        ("x.jsonl", lines, "jsonl"),
        ("x.json", json.dumps(ROWS), "json"),
        ("x.csv", table, ""),
        ("x.tsv", table.replace(",", "\t"), ""),
        ("x.txt", "the old mill stood by the river\n" * 20, ""),
        ("x.jsonl.gz", gzip.compress(lines.encode()), ""),
        ("x.jsonl.bz2", bz2.compress(lines.encode()), ""),
        ("x.jsonl.zst", zstandard.compress(lines.encode()), ""),
    ):
        yield Reader(name, _written(name, content), _documents, values)
    yield Reader("x.parquet", _parquet, _documents)


# ---- plans ----------------------------------------------------------------------------------


def _plan(folder: Path, **tables: Any) -> Plan:
    """This is the tiny plan, over the corpus of `tiny_run`."""
    text = PLAN.format(corpus=_run_folder().parents[1] / "text", prepared=folder / "prepared")
    plan = Plan.read(text, catalogue())
    data = plan.data.model_dump(exclude_unset=True) | tables.pop("data", {})
    return plan.replaced(data=data, **tables)


PLAN_TEXT = """name = "x"
seed = 3
[model]
family = "headrace-mini"
layers = 2
rope_scaling = { kind = "yarn", factor = 2.0, original_length = 64 }
[data]
sources = ["a.jsonl", "b.txt"]
weights = [1.0, 2.0]
sequence_length = 32
[data.deduplication]
method = "minhash"
[goal]
steps = 20
[batch]
tokens = 256
[optimizer]
betas = [0.9, 0.95]
lr_factors = { embeddings = 3.0 }
[mesh]
data = 2
[track]
to = ["tensorboard"]
[techniques.muon]
lr = 0.02
[techniques.lora]
targets = ["mixer.qkv"]
ranks = [4]
[techniques.selective_checkpoint]
save = "matmul"
"""


def _read_plan(file: Path) -> Any:
    return Plan.read(read_plan_text(file), catalogue())


def _imports() -> Iterator[Reader]:
    for trainer, name, read in (
        ("torchtitan", "torchtitan_debug.toml", import_torchtitan),
        ("axolotl", "axolotl_pairs.yml", import_axolotl),
        ("axolotl pretraining", "axolotl_pretrain.yml", import_axolotl),
        ("litgpt", "litgpt_pretrain.yaml", import_litgpt),
        ("nanochat", "nanochat_speedrun.sh", import_nanochat),
        ("nanochat JSON", "nanochat_meta.json", import_nanochat),
        ("nanochat Python", "nanochat_options.py", import_nanochat),
    ):
        values = {".toml": "toml", ".json": "json"}.get(Path(name).suffix, "")

        def make(folder: Path, name: str = name) -> Path:
            return Path(shutil.copy(CONFIGS / name, folder))

        def imported(file: Path, read: Any = read) -> Any:
            return read(file, 2).finish(catalogue(), "x")

        yield Reader(f"config of {trainer}", make, imported, values)


# ---- models ---------------------------------------------------------------------------------


@cache
def _run_folder() -> Path:
    """Train the tiny plan once for this process, and return the run's folder."""
    root = Path(tempfile.mkdtemp(prefix="headrace-readers-"))
    atexit.register(shutil.rmtree, root, ignore_errors=True)
    corpus = write_corpus(root / "text")
    text = PLAN.format(corpus=corpus, prepared=root / "prepared")
    keys = [f"directory={root / 'runs'}", "data.tokenizer_pattern=gpt4"]
    train(Plan.read(text, catalogue(), overrides=keys))
    return root / "runs" / "tiny"


@cache
def _weights() -> Path:
    folder = _run_folder().parents[1] / "weights"
    save_weights(_plan(_run_folder().parents[1]), folder)
    return folder


def _copy_weights(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(_weights(), folder / "weights")
        return folder / "weights" / name

    return make


def _sharded(folder: Path) -> Path:
    """Write an index as weights of several files have it."""
    shutil.copytree(_weights(), weights := folder / "weights")
    whole = weights / "model.safetensors"
    with safe_open(whole, "pt") as opened:
        placed = dict.fromkeys(opened.keys(), "a.safetensors")
    whole.rename(weights / "a.safetensors")
    (index := weights / "model.safetensors.index.json").write_text(
        json.dumps({"metadata": {"total_size": 1}, "weight_map": placed})
    )
    return index


def _load(file: Path) -> None:
    config, source = load_pretrained(file.parent)
    source("embed.weight", torch.Size((config.vocab, config.dim)))


def _adapter(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        given = folder / "adapter"
        given.mkdir()
        dim, stem = 16, "base_model.model.model.layers.0.self_attn.o_proj"
        save_file(
            {
                f"{stem}.lora_A.weight": torch.zeros(2, dim),
                f"{stem}.lora_B.weight": torch.zeros(dim, 2),
            },
            given / "adapter_model.safetensors",
        )
        config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["o_proj"]}
        config |= {"base_model_name_or_path": "x", "bias": "none", "use_rslora": False}
        (given / "adapter_config.json").write_text(json.dumps(config))
        return given / name

    return make


def _read_adapters(file: Path) -> Any:
    return read_adapters(file.parent, _weights(), load_pretrained(_weights())[0], "model.adapter")


def _read_tokenizer(file: Path) -> None:
    tokenizer = Tokenizer.load(file)
    tokenizer.decode(tokenizer.encode_batch(["the old mill, caf\xe9"])[0].tolist())


def _read_template(file: Path) -> None:
    text = file.read_bytes().decode(errors="replace")
    template = ChatTemplate(text, {"bos_token": "<s>"}, date(2024, 1, 1))
    template.render([{"role": "user", "content": "x"}, {"role": "assistant", "content": "y"}])


TEMPLATE = (
    "{% set n = namespace(k=0) %}{% for m in messages %}{% set n.k = n.k + 1 %}"
    "{{ m.content | trim | replace('a', 'b') | tojson }}{% if loop.first %}{{ bos_token * 2 }}"
    "{% endif %}{{ '%s %5d' | format(m.role, n.k) }}{% endfor %}" + CHATML_TEXT
)


# ---- runs -----------------------------------------------------------------------------------


def _of_run(name: str) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        shutil.copytree(_run_folder(), folder / "tiny", symlinks=True)
        return folder / "tiny" / name

    return make


def _doctor_and_page(file: Path) -> None:
    run = next(folder for folder in file.parents if (folder / "plan.toml").is_file())
    for step in (lambda: diagnose([run]), lambda: write_report(run)):
        try:
            step()
        except FINE:
            continue


def _going_run(folder: Path) -> Path:
    """Copy the run without its report, as one that goes on; return its metrics."""
    file = _of_run("metrics.jsonl")(folder)
    (file.parent / "report.json").unlink()
    return file


def _seal_checkpoint(file: Path) -> None:
    """Make the digests of a checkpoint anew, where its index still says which."""
    try:
        index = json.loads((file.parent / "checkpoint.json").read_text())
        tensors = file.parent / "rank-00000.safetensors"
        data = tensors.read_bytes()
        if file == tensors:
            digest = hashlib.sha256(data).hexdigest()
            index["parts"][0] |= {"bytes": len(data), "sha256": digest}
        (file.parent / "checkpoint.json").write_text(json.dumps(_sealed(index)))
    except MALFORMED:
        return


def _read_checkpoint(file: Path) -> None:
    saved = Saved(file.parent)
    for name in saved.names():
        shape, dtype = saved.shape_of(name)
        if len(shape) < 4 and all(isinstance(n, int) and 0 <= n < 10_000 for n in shape):
            saved.fill_(name, torch.empty(shape, dtype=dtype))


def _prepared_of_run(folder: Path) -> Path:
    source = next((_run_folder().parents[1] / "prepared").rglob("manifest.json"))
    shutil.copytree(source.parent, folder / "shards")
    return folder / "shards" / "manifest.json"


def _seal_manifest(file: Path) -> None:
    """Make the seal of a manifest anew, where it can still be read."""
    try:
        values = json.loads(file.read_text())
        seal = Manifest(**{**values, "seal": ""}).digest
        file.write_text(json.dumps({**values, "seal": seal}))
    except MALFORMED:
        return


def _read_shards(file: Path) -> None:
    shards = Shards.open(file.parent)
    shards.verify()
    shards.read(0, min(shards.manifest.tokens, 64))


EVENTS = [
    {"ph": "X", "cat": "user_annotation", "name": f"ProfilerStep#{n}", "ts": n * 1e4, "dur": 9e3}
    | {"pid": 1, "tid": 1}
    for n in range(5)
] + [
    {"ph": "X", "cat": cat, "name": name, "ts": n * 1e4 + 10 * k, "dur": 50.0, "pid": 0, "tid": 7}
    | {"args": {"correlation": n * 10 + k, "stream": 7, "device": 0, "External id": k}}
    for n in range(5)
    for k, (cat, name) in enumerate(
        (
            ("cuda_runtime", "cudaLaunchKernel"),
            ("kernel", "sm90_xmma_gemm_f32f32"),
            ("kernel", "ncclDevKernel_AllReduce"),
            ("gpu_memcpy", "Memcpy HtoD"),
            ("cpu_op", "aten::item"),
            ("cuda_runtime", "cudaMalloc"),
        )
    )
]
TRACE = json.dumps(
    {
        "deviceProperties": [{"name": "NVIDIA H100", "computeMajor": 9}],
        "distributedInfo": {"rank": 0, "world_size": 2},
        "traceEvents": EVENTS,
    }
)


LOG = "".join(
    f"step {n:05d}/00040 (2.5%) | loss: {9 - n / 9:.6f} | lrm: 1.00 | dt: 50.31ms | "
    f"tok/sec: 1,042 | mfu: 48.31 | total time: 0.10m\n"
    for n in range(40)
)


def _gguf(folder: Path) -> Path:
    tokenizer = open_tokenizer(str(_run_folder() / "tokenizer.json"))
    write(model({"vocab": tokenizer.vocab}), tokenizer, file := folder / "x.gguf")
    return file


def _read_gguf(file: Path) -> None:
    fields = _fields(file)
    _origin(fields)
    _quantized(fields)


def _machine(folder: Path) -> Path:
    Machine.assumed("H100").write(file := folder / "m.json")
    return file


def make_shared() -> None:
    """Make what several readers share, before processes are forked for them."""
    _weights()
    catalogue()


READERS: dict[str, Reader] = {
    reader.name: reader
    for reader in (
        Reader("plan", _written("x.toml", PLAN_TEXT), _read_plan, "toml"),
        *_imports(),
        *_texts(),
        Reader("conversations", _written("t.jsonl", _lines(TALKS)), _talks, "jsonl"),
        Reader("tokenizer.json", _of_run("tokenizer.json"), _read_tokenizer, "json"),
        Reader("chat template", _written("t.jinja", TEMPLATE), _read_template),
        Reader("config.json", _copy_weights("config.json"), _load, "json"),
        Reader("index of weights", _sharded, _load, "json"),
        Reader("safetensors", _copy_weights("model.safetensors"), _load, "safetensors"),
        Reader("adapter_config.json", _adapter("adapter_config.json"), _read_adapters, "json"),
        Reader("adapter", _adapter("adapter_model.safetensors"), _read_adapters, "safetensors"),
        Reader("trace", _written("r.json", TRACE), lambda file: diagnose([file]), "json"),
        Reader(
            "trace.gz",
            _written("r.json.gz", gzip.compress(TRACE.encode())),
            lambda file: diagnose([file]),
        ),
        Reader("log", _written("x.log", LOG), lambda file: diagnose([file])),
        Reader("manifest.json", _prepared_of_run, _read_shards, "json", _seal_manifest),
        Reader(
            "checkpoint.json",
            _of_run("checkpoints/step-12/checkpoint.json"),
            _read_checkpoint,
            "json",
            _seal_checkpoint,
        ),
        Reader(
            "checkpoint",
            _of_run("checkpoints/step-12/rank-00000.safetensors"),
            _read_checkpoint,
            "safetensors",
            _seal_checkpoint,
        ),
        Reader("report.json", _of_run("report.json"), _doctor_and_page, "json"),
        Reader("metrics.jsonl", _of_run("metrics.jsonl"), _doctor_and_page, "jsonl"),
        Reader("metrics.jsonl as it grows", _going_run, served("runs"), "jsonl"),
        Reader("path.json", tuning, served("tunings"), "json"),
        Reader("environment.json", _of_run("environment.json"), _doctor_and_page, "json"),
        Reader("data.json", _of_run("data.json"), _doctor_and_page, "json"),
        Reader("plan of a run", _of_run(".plan.toml"), _doctor_and_page, "toml"),
        Reader(
            "machine rates",
            _machine,
            Machine.read,
            "json",
        ),
        Reader("gguf", _gguf, _read_gguf),
    )
}

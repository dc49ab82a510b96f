"""Errors of techniques and of ranks that are raised here as a run meets them there.

No GPU and no second rank is needed to make them; what each remedy says is asked of a plan for an
H200, whose check refuses what cannot run, or is done.
"""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pieces import ring_of
from remedies import alternatives, words_of
from remedy_python import Call
from shell import after, run
from torch import nn

from headrace import probes
from headrace.assemble import autotune as choose
from headrace.assemble.sockets import MicroBatch
from headrace.cli.catalogue import catalogue
from headrace.core.model_config import ModelConfig
from headrace.core.progress import Progress
from headrace.costs.machine import Machine
from headrace.model.attention import Sdpa, SelfAttention
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec, Rows
from headrace.parallel import pipeline
from headrace.parallel.layout import Layout
from headrace.parallel.tensor import Peers
from headrace.plan.plan import OptimizerConfig, Plan
from headrace.probes import at_hand
from headrace.techniques.attention import flash_attention_3, linear_attention, varlen_attention
from headrace.techniques.attention.flash_attention import FlashSdpa
from headrace.techniques.compile import compile_cache
from headrace.techniques.memory.adamw_8bit import Adamw8bit
from headrace.techniques.parallel import pipeline_parallel, tensor_parallel
from headrace.techniques.parallel.context_parallel import RingAttend
from headrace.train import train

CPU = torch.device("cpu")
H200 = ["plan", "demo", "--device-name", "H200"]
MAKE = Callable[[pytest.MonkeyPatch], Any]
TENSOR = "mesh.tensor=2 --with tensor_parallel"
PIPELINE = "mesh.pipeline=4 model.layers=8 --with pipeline_parallel"
PREFIX = "--with prefix_lm techniques.prefix_lm.tokens=64"


def planned(words: str) -> Callable[[str], None]:
    """Ask for a plan with every way of a remedy in the place of these words: each is accepted."""

    def mends(remedy: str) -> None:
        ways = [words_of(way) for way in alternatives(remedy)]
        typed = [way for way in ways if way]
        assert typed, f"{remedy!r} has nothing to type"
        for way in typed:
            argv = after([*H200, *words.split()], way)
            told = run(argv)
            assert not told.code, (argv, told)

    return mends


def installs(package: str, words: str) -> Callable[[str], None]:
    """A remedy that installs a package anew, which nothing here can do, or leaves it out."""

    def mends(remedy: str) -> None:
        assert remedy.startswith(package), remedy
        planned(words)(remedy.partition(" (or ")[2].removesuffix(")"))

    return mends


# --- attention -------------------------------------------------------------------------------


def cannot_load(patch: pytest.MonkeyPatch) -> None:
    """Put a kernel in force that was built for another torch."""

    def fail(version: str) -> None:
        raise ImportError("undefined symbol")

    patch.setattr(flash_attention_3, "activate_flash_attention_impl", fail)
    flash_attention_3.activate("FA3")


def cannot_fetch(patch: pytest.MonkeyPatch) -> None:
    """Fetch a kernel without a network."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError("no network")

    patch.setitem(sys.modules, "kernels", SimpleNamespace(get_kernel=fail))
    flash_attention_3.fetch("")


def rows_of(documents: int, rows: int = 1) -> Rows:
    """Return rows in which every token is a document of its own."""
    segments = torch.arange(documents).expand(rows, -1) + torch.arange(rows)[:, None] * documents
    return Rows(segments, segments)


def many_documents(rows: int) -> MAKE:
    """Give the kernel rows with one document more than it takes."""

    def fails(patch: pytest.MonkeyPatch) -> None:
        patch.setattr(varlen_attention, "MOST_DOCUMENTS", 15)
        backend = varlen_attention.VarlenBackend()
        backend.prepare(MaskSpec(document=True), rows_of(16 // rows, rows), 16 // rows)

    return fails


def fewer_rows(remedy: str) -> None:
    """Give it as many rows as the remedy says."""
    key, _, rows = remedy.partition("=")
    assert key == "batch.micro_sequences" and int(rows) == 1
    backend = varlen_attention.VarlenBackend()
    backend.prepare(MaskSpec(document=True), rows_of(8, int(rows)), 8)


def measures(remedy: str) -> None:
    """Choose with a catalogue, or let the plan's techniques decide."""
    call, _, key = remedy.partition(" or ")
    plan = chosen("attention=measured")
    names = {"train": train, "plan": plan, "progress": Progress(), "catalogue": catalogue}
    Path("x.txt").write_text("The old mill grinds the corn of the valley.\n\n" * 400)
    assert eval(call, names) is not None
    left = chosen(key)
    assert choose.choose_attention(left, None, *nothing()) == (left, None)


def chosen(key: str) -> Plan:
    """Return a tiny plan for the CPU with one more override, as a choice of attention."""
    keys = [
        *("device=cpu", "data.sources=x.txt", "model.dim=16", "model.layers=1", "model.heads=2"),
        *("model.ffn=32", "data.vocab=260", "data.sequence_length=16", "batch.tokens=64"),
        *("goal.steps=1", "schedule.warmup_steps=0", "eval.tokens=32", "guard=false", key),
    ]
    return Plan.read("", catalogue(), overrides=keys)


def nothing() -> Any:
    """Data, world, device and progress, none of which is looked at."""
    return (None, None, CPU, None)


# --- devices ---------------------------------------------------------------------------------


def unknown_gpu(patch: pytest.MonkeyPatch) -> None:
    """Ask for the rates of a GPU without a datasheet's row, where nothing may be measured."""
    patch.setattr(at_hand, "name_of", lambda device: "NVIDIA RTX 6000D")
    patch.setattr(at_hand, "cached", lambda device: None)
    at_hand.rates(torch.device("cuda"))


def measures_there(remedy: str) -> None:
    """Measure the device of the remedy, up to where its time is taken."""
    key, _, device = remedy.partition("=")
    found = Machine.assumed("cpu")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(probes, "_run", lambda device, *_: device)
        patch.setattr(probes, "_machine", lambda device: found)
        patch.setattr(probes, "cached", lambda device: None)
        assert key == "device" and probes.measured(torch.device(device)) is found


def is_known(remedy: str) -> None:
    """The command of the remedy is one that Headrace knows."""
    words = remedy.split()
    assert words[:2] == ["headrace", "probe"] and not run([*words[1:], "--help"]).code


# --- folders ---------------------------------------------------------------------------------


def keep_in(folder: str, mode: int = 0o700) -> MAKE:
    """Keep what is compiled in a folder."""

    def fails(_: pytest.MonkeyPatch) -> None:
        Path("file").touch()
        Path("my open").mkdir()
        Path("my open").chmod(mode)
        compile_cache.kept_in(Path(folder), {"before": None}).__enter__()

    return fails


def kept_elsewhere(remedy: str) -> None:
    """Keep it in a folder that can be written into."""
    key, _, value = remedy.partition("=")
    assert key == "techniques.compile_cache.directory" and value.startswith("FOLDER")
    with compile_cache.kept_in(Path("own"), {"before": None}):
        assert Path("own").is_dir()


def kept_there(remedy: str) -> None:
    """Change the mode as the remedy says; and the other folder is as good."""
    command, _, other = remedy.partition(" (or ")
    subprocess.run(["bash", "-ec", command], check=True)
    for folder in ("my open", other.removesuffix(")").partition("=")[2].strip("'")):
        with compile_cache.kept_in(Path(folder), {"before": None}):
            assert Path(folder).is_dir()


# --- ranks -----------------------------------------------------------------------------------


def cut_columns(_: pytest.MonkeyPatch) -> None:
    """Give two ranks blocks of 256 of a matrix with 320 columns."""
    layout = Layout(torch.Size((512, 320)))
    layout.split["tensor"] = 1
    build: Any = SimpleNamespace(
        layouts={"blocks.0.mlp.down.weight": layout},
        world=SimpleNamespace(size=lambda axis: 2),
        context=SimpleNamespace(device="cpu", has_triton=False),
        plan=SimpleNamespace(optimizer=OptimizerConfig()),
        routes=[],
    )
    Adamw8bit().apply(build)
    build.routes[0].make({"blocks.0.mlp.down.weight": nn.Parameter(torch.zeros(512, 160))})


def shrunk_rows(_: pytest.MonkeyPatch) -> None:
    """Give two ranks rows of 14 tokens."""
    ids_BT = torch.zeros(2, 14, dtype=torch.long)
    RingAttend(ring_of(1, 2)).part(MicroBatch(ids_BT, ids_BT, Rows(ids_BT), ids_BT))


def prefix_in_ring(_: pytest.MonkeyPatch) -> None:
    """Give a ring a prefix that sees both ways."""
    RingAttend(ring_of(0, 2)).prepare(MaskSpec(prefix=True), Rows(torch.arange(4)[None]), 4)


def window_in_ring(_: pytest.MonkeyPatch) -> None:
    """Give a ring a window, and a kernel that has none."""
    ring = RingAttend(ring_of(0, 2), FlashSdpa())
    ring.prepare(MaskSpec(window=3), Rows(torch.arange(4)[None]), 4)


class Opaque(nn.Module):
    """A part that does not say how it is split."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)


def cut(part: nn.Module, ranks: int = 2) -> None:
    """Cut a part over ranks."""
    layouts = {f"blocks.0.mlp.{n}": Layout(p.shape) for n, p in part.named_parameters()}
    build: Any = SimpleNamespace(layouts=layouts)
    peers = Peers("", ranks, 0)
    tensor_parallel.TensorParallel()._cut_part(build, "blocks.0.mlp", part, peers)


def adapted() -> nn.Module:
    """An attention whose first linear has a parameter that nothing is known of."""
    attention = SelfAttention(ModelConfig(dim=8, heads=2), 0, Sdpa())
    attention.qkv.register_parameter("more", nn.Parameter(torch.zeros(3)))
    return attention


def two_biases(_: pytest.MonkeyPatch) -> None:
    """Put collectives around a part whose last linear is of a kind of its own."""
    part: Any = Opaque()
    part.inner = type("Own", (nn.Linear,), {})(4, 4)
    part.rows = ("inner",)
    tensor_parallel._around(part, SimpleNamespace())  # pyright: ignore


def unknown_parameter(_: pytest.MonkeyPatch) -> None:
    """Cut the ends of a model that has a parameter that nothing is known of."""
    model = Decoder(CONFIG, baseline_parts(CONFIG), MaskSpec())
    model.register_parameter("more", nn.Parameter(torch.zeros(3)))
    layouts = {n: Layout(p.shape) for n, p in model.named_parameters()}
    build: Any = SimpleNamespace(model=model, config=CONFIG, layouts=layouts)
    peers: Any = SimpleNamespace(ranks=2, place=0)
    tensor_parallel.TensorParallel()._cut_ends(build, peers)


CONFIG = ModelConfig(vocab=64, dim=16, layers=1, heads=2, ffn=32)
UNCUT = planned(TENSOR)
FA3 = "techniques/attention/flash_attention_3"
VARLEN = "techniques/attention/varlen_attention"
RING = "techniques/parallel/context_parallel:RingAttend"
CUT = "techniques/parallel/tensor_parallel"
CACHE = "techniques/compile/compile_cache:kept_in"
TECHNIQUES = {
    "assemble/autotune:choose_attention#1": Call(
        lambda patch: choose.choose_attention(chosen("attention=measured"), None, *nothing()),
        measures,
    ),
    "parallel/pipeline:interleaved#1": Call(
        lambda patch: pipeline.interleaved(4, 0, 7, 2),
        planned(
            f"{PIPELINE} techniques.pipeline_parallel.schedule=interleaved "
            "techniques.pipeline_parallel.chunks=2"
        ),
    ),
    "probes/__init__:measured#1": Call(
        lambda patch: probes.measured(torch.device("mps")), measures_there
    ),
    "probes/at_hand:rates#1": Call(unknown_gpu, is_known),
    f"{FA3}:activate#1": Call(cannot_load, installs("git clone", "--with flash_attention_3")),
    f"{FA3}:fetch#1": Call(
        cannot_fetch, installs("pip install kernels -U", "--with flash_attention_3")
    ),
    "techniques/attention/linear_attention:Documents.prepare#1": Call(
        lambda patch: linear_attention.Documents().prepare(MaskSpec(prefix=True), rows_of(4), 4),
        planned(f"--with linear_attention {PREFIX}"),
    ),
    f"{VARLEN}:window_of#1": Call(
        lambda patch: varlen_attention.window_of(MaskSpec(prefix=True)),
        planned(f"--with varlen_attention {PREFIX}"),
    ),
    f"{VARLEN}:VarlenBackend.prepare#1": Call(many_documents(2), fewer_rows),
    f"{CACHE}#1": Call(keep_in("file/cache"), kept_elsewhere),
    f"{CACHE}#2": Call(keep_in("my open", 0o777), kept_there),
    "techniques/memory/adamw_8bit:Adamw8bit.apply.make#1": Call(
        cut_columns, planned(f"{TENSOR} --with adamw_8bit model.dim=320 model.heads=4")
    ),
    f"{RING}._check_plain#1": Call(
        window_in_ring,
        planned(
            "mesh.context=2 --with context_parallel --with flash_attention --with document_packing"
        ),
    ),
    f"{RING}.prepare#1": Call(
        prefix_in_ring, planned(f"mesh.context=2 --with context_parallel {PREFIX}")
    ),
    "assemble/row_parts:part_of#1": Call(
        shrunk_rows, planned("mesh.context=2 --with context_parallel data.sequence_length=14")
    ),
    "techniques/parallel/pipeline_parallel:split#1": Call(
        lambda patch: pipeline_parallel.split(3, 4), planned(f"{PIPELINE} model.layers=3")
    ),
    "techniques/parallel/pipeline_parallel:make_parts#1": Call(
        lambda patch: pipeline_parallel.make_parts(("0", "1", "2"), 2, counts=(3, 1)),
        planned(f"{PIPELINE} techniques.pipeline_parallel.layers=[5,1,1,2]"),
    ),
    f"{CUT}:TensorParallel._cut_part#1": Call(lambda patch: cut(Opaque()), UNCUT),
    f"{CUT}:TensorParallel._cut_ends#1": Call(unknown_parameter, UNCUT),
    f"{CUT}:_cuts#1": Call(lambda patch: cut(adapted()), UNCUT),
    f"{CUT}:_around#1": Call(two_biases, planned(f"{TENSOR} model.bias=true")),
}
"""Each error by its site."""

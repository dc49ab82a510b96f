"""Runs and their files that are not what was trained, and runs that were cut off."""

import errno
import json
import os
import shlex
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from remedy_inputs import GOOD, swapped
from remedy_weights import MIXER, TRAIN, broken, says, sound
from safetensors.torch import load_file, save_file
from shell import Case, once, run
from tiny import resealed

from headrace.core.files import hold_lock
from headrace.export import hf
from headrace.observe.signals import Signals
from headrace.plan.technique import Evidence
from headrace.report import page
from headrace.techniques.loss.z_loss import ZLoss
from headrace.train import checkpoint, session
from headrace.train.checkpoint import Checkpoints

MAKE = Callable[[Path], Any]
FAKE = Callable[[pytest.MonkeyPatch], Any]


def trained(words: str) -> MAKE:
    """Train another run beside the one that is there, from that one's plan."""

    def make(_: Path) -> None:
        ended = run(["train", "runs/demo/plan.toml", "goal.steps=1", *shlex.split(words)])
        assert ended.code == 0, ended

    return make


def edited(before: str, after: str, *, copy: bool = False) -> MAKE:
    """Change the plan of the run by hand; without the copy of it where `copy` is set."""

    def make(folder: Path) -> None:
        text = (folder / "plan.toml").read_text()
        assert before in text
        (folder / "plan.toml").write_text(text.replace(before, after))
        if copy:
            (folder / ".plan.toml").unlink()

    return make


def tuned(change: MAKE) -> MAKE:
    """Train adapters beside the weights of `hf`, and change that folder then."""

    def make(folder: Path) -> None:
        broken(lambda _: Path("x.jsonl").write_text(GOOD))(folder)
        once(train_beside_hf, "runs/tuned")
        change(Path("hf"))

    return make


def train_beside_hf() -> None:
    """Train adapters beside the weights of `hf`."""
    words = f"{TRAIN} checkpoint.every_steps=1 model.pretrained=hf --with lora name=tuned"
    assert run(words.split()).code == 0


def other_weights(folder: Path) -> None:
    """Add 1 to a tensor."""
    file = folder / "model.safetensors"
    tensors = load_file(file)
    next(iter(tensors.values())).add_(1)
    save_file(tensors, file, metadata={"format": "pt"})


def fewer_entries(folder: Path) -> None:
    """Cut the embedding below its tokenizer's entries."""
    file = folder / "model.safetensors"
    tensors = {n: t[:290].clone() if t.size(0) == 320 else t for n, t in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    says(vocab_size=290)(folder)


def other_tokenizer(folder: Path) -> None:
    """Let the run's tokenizer be another."""
    spec = json.loads((folder / "tokenizer.json").read_text())
    swapped(spec)
    (folder / "tokenizer.json").write_text(json.dumps(spec))


def no_numbers(folder: Path) -> None:
    """Save weights that are NaN."""
    resealed(
        folder / "checkpoints" / "step-6",
        lambda tensors, part: tensors[f"model/{MIXER}"].fill_(float("nan")),
    )


def newer(folder: Path) -> None:
    """Let a later version have written the report."""
    file = folder / "report.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"format": 9}))


def no_plan(folder: Path, *, copies: bool) -> None:
    """Copy the run to `pair`, and break the file of the plan that it began with."""
    pair = folder.with_name("pair")
    shutil.copytree(folder, pair, symlinks=True)
    (folder / ".plan.toml").write_text("x = [")
    if not copies:
        (folder / ".plan.toml").rename(folder / "plan.toml")


def unreadable(folder: Path) -> None:
    """Let no read of the rows succeed, for an administrator neither."""
    (folder / "metrics.jsonl").unlink()
    (folder / "metrics.jsonl").symlink_to("/proc/self/mem")


def without_pretrained(words: str) -> str:
    """Return the command line of a training that begins with the weights in `hf`."""
    return f"{TRAIN} model.pretrained=hf {words}"


BACK, NEW, RUN = "put the weights back into hf", {"NEW": "again"}, "runs/demo/plan.toml"
FILES = {
    "assemble/build:_model_config#1": Case(
        without_pretrained(""),
        broken(lambda folder: (fewer_entries(folder), Path("x.jsonl").write_text(GOOD))),
        does={
            "python -c 'from transformers import AutoModelForCausalLM as M; m = M.from_pretrained("
            "'\"'\"'hf'\"'\"'); m.resize_token_embeddings(300); "
            "m.save_pretrained('\"'\"'hf'\"'\"')'": sound
        },
    ),
    "assemble/build:_model_config#2": Case(
        "train {tiny} model.vocab=100", prose={"leave it out": "320"}
    ),
    "assemble/build:_model_config#3": Case("train {tiny} model.position=learned model.context=8"),
    "train/evaluate:_summed#1": Case(
        "train {tiny} data.validation=own.jsonl --with prefix_lm techniques.prefix_lm.tokens=15 "
        "seed=1",
        lambda _: (
            Path("own.jsonl").write_text('{"text": "mill 1"}\n'),
            Path("x.jsonl").write_text(GOOD),
        ),
        fills={"PATH of more text": "x.jsonl"},
    ),
    "export/run:refuse_parts#1": Case(
        "export other --to hf", trained("--with mixture_of_experts name=other")
    ),
    "export/run:refuse_parts#2": Case(
        "export other --to hf",
        trained("--with sliding_window techniques.sliding_window.window=4 name=other"),
    ),
    "export/run:refuse_parts#3": Case(
        "export other --to hf",
        trained("model.logit_cap=30 --with embedding_smear --with bigram_embeddings name=other"),
        through=("model/hf_config:architecture#1",),
    ),
    "export/folder:_new#2": Case(
        "export demo --to hf",
        fake=lambda patch: patch.setattr(hf, "save_file", full),
        fills={"FOLDER on a disk with room for the weights": "out"},
        lifted=True,
    ),
    "export/folder:_new#3": Case(
        "export demo --to hf --output file/out",
        lambda folder: Path("file").write_text(""),
        fills={"FOLDER that can be written": "out"},
    ),
    "train/identity:check_same_run#1": Case(f"train {RUN} --resume goal.steps=7 seed=5", fills=NEW),
    "train/identity:check_same_run#1 rate": Case(
        f"train {RUN} --resume goal.steps=7 optimizer.lr=0.1"
    ),
    "train/identity:check_same_run#1 technique": Case(
        f"train {RUN} --resume goal.steps=7 --without muon", fills=NEW
    ),
    "train/identity:without_base#1": Case(
        "eval tuned",
        tuned(shutil.rmtree),
        fills={**NEW, "FOLDER": "kept"},
        prose={BACK: "tried below"},
    ),
    "train/identity:without_base#1 back": Case(
        "eval tuned",
        tuned(shutil.rmtree),
        does={BACK: lambda _: shutil.copytree("kept", "hf")},
        fills={**NEW, "FOLDER": "kept"},
    ),
    "train/identity:_check_shape_of_base#1": Case(
        "eval tuned",
        tuned(says(rms_norm_eps=0.5)),
        fills=NEW,
        prose={"put the config.json of then back into hf": "tried below"},
    ),
    "train/identity:_check_shape_of_base#1 back": Case(
        "eval tuned",
        tuned(says(rms_norm_eps=0.5)),
        does={"put the config.json of then back into hf": sound},
        fills=NEW,
    ),
    "train/identity:check_frozen#1": Case(
        "eval tuned", tuned(other_weights), fills=NEW, prose={BACK: "tried below"}
    ),
    "train/identity:check_frozen#1 back": Case(
        "eval tuned", tuned(other_weights), does={BACK: sound}, fills=NEW
    ),
    "inference/load:own_tokenizer#2": Case("sample demo", other_tokenizer, whole=True),
    "inference/load:_check_same_model#1": Case(
        "eval demo", edited("dim = 16", "dim = 32"), whole=True
    ),
    "inference/load:_check_same_model#1 copy": Case(
        "eval demo", edited("dim = 16", "dim = 32", copy=True)
    ),
    "model/lora:linears_of#1": Case(
        without_pretrained("--with lora 'techniques.lora.targets=[\"foo\"]'"),
        broken(lambda _: Path("x.jsonl").write_text(GOOD)),
    ),
    "costs/adapters:_chosen#1": Case(
        "explain {tiny} --with lora 'techniques.lora.targets=[\"foo\"]'",
    ),
    "report/advice:_read#1": Case(
        "report demo", lambda folder: (folder / "findings.json").write_text("{"), whole=True
    ),
    "report/compare:compare_reports#1": Case("report " + "demo " * 9),
    "report/compare:_plan#1": Case("report demo pair", partial(no_plan, copies=True), whole=True),
    "report/compare:_plan#1 alone": Case("report demo pair", partial(no_plan, copies=False)),
    "report/page:write_page#2": Case(
        "report demo",
        fake=lambda patch: patch.setattr(page, "write_whole", full),
        lifted=True,
        prose={"free some space in runs/demo": "no command"},
    ),
    "report/page:write_page#3": Case("report demo demo --output out/x.html", whole=True),
    "report/metrics:read_text#2": Case("report demo", unreadable, whole=True),
    "report/run_files:read_report#1": Case(
        "report demo", newer, prose={"the version of Headrace that wrote it": "it is not here"}
    ),
    "inference/sample:_check#2": Case(
        "sample other --tokens 100", trained("model.position=learned name=other")
    ),
    "inference/sample:_check#2 prompt": Case(
        "sample other --prompt '" + "the mill " * 40 + "'",
        trained("model.position=learned name=other"),
        fills={"TEXT --tokens 1, where TEXT has at most 14 tokens": "mill --tokens 1"},
    ),
    "train/state:refuse_wild#1": Case("eval demo", no_numbers),
    "assemble/filled:check_active#1": Case(
        "train {tiny} goal.steps=2 --with z_loss",
        fake=lambda patch: patch.setattr(ZLoss, "active", lost),
        lifted=True,
    ),
}
"""Files of runs that say otherwise than what was trained, and plans that cannot be trained."""


def full(*_: Any, **__: Any) -> None:
    """Fail as a write to a full disk does."""
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def lost(*_: Any) -> Evidence:
    """Say that a technique is not in force."""
    return Evidence(active=False, detail="no loss had it")


def at_step(act: Callable[[], Any]) -> FAKE:
    """Do something when the second step of a run has been issued."""
    ends = Signals.end_step

    def end_step(self: Signals, step: int, *rest: Any) -> None:
        ends(self, step, *rest)
        if step == 2:
            act()

    return lambda patch: patch.setattr(Signals, "end_step", end_step)


def raises(error: BaseException) -> Callable[[], None]:
    """Raise it."""

    def act() -> None:
        raise error

    return act


def two_ranks(patch: pytest.MonkeyPatch, *, waits: bool) -> None:
    """Save as the first of two ranks, of which the other saves nothing."""

    class First(Checkpoints):
        def __init__(self, folder: Path, *, rank: int, ranks: int, **rest: Any) -> None:
            folder.mkdir(parents=True)
            super().__init__(folder, rank=0, ranks=2, **rest)
            if not waits:
                self._lock_of(1).touch()

    patch.setattr(session, "Checkpoints", First)
    patch.setattr(checkpoint, "WAIT_FOR_RANKS_S", 0.05 if waits else 60.0)


LOCKS: list[Any] = []


def locked(folder: Path) -> None:
    """Hold the run as a process that trains it does, until the test ends."""
    LOCKS.append(hold_lock(folder / ".lock", wait=False, key="directory"))


ROOM = {"free some space": lambda _: None}
OTHER = "train {tiny} name=other"
ENDED = {
    "train/checkpoint:Checkpoints.wait#1": Case(
        OTHER,
        fake=lambda patch: patch.setattr(checkpoint, "save_file", full),
        does=ROOM,
        lifted=True,
    ),
    "train/checkpoint:check_space#1": Case(
        OTHER,
        fake=lambda patch: patch.setattr(
            "headrace.train.checkpoint.shutil.disk_usage",
            lambda _: shutil._ntuple_diskusage(9, 9, 0),
        ),
        does=ROOM,
        lifted=True,
    ),
    "train/checkpoint:Checkpoints._read_part#1": Case(
        OTHER, fake=partial(two_ranks, waits=True), lifted=True
    ),
    "train/checkpoint:Checkpoints._read_part#2": Case(
        OTHER, fake=partial(two_ranks, waits=False), lifted=True
    ),
    "train/run_folder:RunFolder.create#1": Case(
        "train {tiny} directory=file/runs",
        lambda _: Path("file").touch(),
        fills={"FOLDER that can be written": "out"},
    ),
    "train/run_folder:RunFolder.fork#1": Case(
        f"train {RUN} --resume --checkpoint step-3 optimizer.lr=0.001",
        fake=lambda patch: patch.setattr("headrace.train.run_folder.shutil.copytree", full),
        does={"free some space": lambda _: None},
        fills={"FOLDER that can be written": "out"},
        lifted=True,
    ),
    "train/run_folder:RunFolder.lock#1": Case(
        f"train {RUN} --resume goal.steps=7",
        locked,
        fills=NEW,
        prose={"wait until it ends": "no command"},
    ),
    "train/run_folder:_lost#1": Case(
        OTHER,
        fake=at_step(raises(RuntimeError("[gloo] Connection closed by peer [::1]:9"))),
        lifted=True,
    ),
    "train/run_folder:in_words#1": Case(OTHER, fake=at_step(full), does=ROOM, lifted=True),
    "train/session:Session.finish#1": Case(
        OTHER, fake=at_step(lambda: os.kill(os.getpid(), signal.SIGTERM)), lifted=True
    ),
    "train/session:Session._check_folder#1 checkpoints": Case(
        OTHER,
        fake=at_step(lambda: os.rename("runs/other/checkpoints", "elsewhere")),
        does={"put it back": lambda _: os.rename("elsewhere", "runs/other/checkpoints")},
        lifted=True,
    ),
    "train/session:Session._check_folder#1 deleted": Case(
        OTHER,
        fake=at_step(lambda: shutil.rmtree("runs/other/checkpoints")),
        does={"put it back": lambda _: Path("runs/other/checkpoints").mkdir()},
        lifted=True,
    ),
    "train/session:Session._check_folder#1": Case(
        OTHER,
        fake=at_step(lambda: os.rename("runs/other", "elsewhere")),
        does={"put it back": lambda _: os.rename("elsewhere", "runs/other")},
        lifted=True,
    ),
}
"""Runs that end before their goal."""
RUNS = FILES | ENDED

"""What a rename makes current is on the disk before its name is, and its name before a removal.

Every fsync, rename and removal is recorded while something is kept. The order is what survives a
power cut: content, then name, then the folder's list of names, and only then what is replaced goes.
"""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny import PLAN, write_corpus

import headrace
from headrace.cli.catalogue import catalogue
from headrace.core import files
from headrace.core.errors import ConfigError
from headrace.core.files import hold_lock, recorded_plan, write_whole
from headrace.core.model_config import ModelConfig
from headrace.costs.machine import Machine
from headrace.data.ingest import prepare
from headrace.data.tokenizer import train_tokenizer
from headrace.export.hf import export_hf
from headrace.model.companions import keep_companions
from headrace.model.decoder import Decoder, baseline_parts
from headrace.model.mask import MaskSpec
from headrace.plan.plan import Plan
from headrace.report.page import page, write_page
from headrace.train.checkpoint import Checkpoints
from headrace.train.run_folder import RunFolder


class Disk:
    """Which content and which names a power cut would leave."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.synced: dict[int, int] = {}
        self.unsure: dict[Path, Path] = {}
        self.published: list[str] = []
        self._real = {name: getattr(os, name) for name in ("fsync", "replace", "unlink")}
        monkeypatch.setattr(os, "fsync", self._fsync)
        monkeypatch.setattr(os, "replace", self._rename)
        monkeypatch.setattr(os, "rename", self._rename)
        rmtree = shutil.rmtree

        def remove(path: Any, *args: Any, **kwargs: Any) -> None:
            assert not self.unsure, f"{path} is removed before {self.unsure} is sure"
            rmtree(path, *args, **kwargs)

        monkeypatch.setattr(shutil, "rmtree", remove)

    def _fsync(self, descriptor: int) -> None:
        self._real["fsync"](descriptor)
        found = os.fstat(descriptor)
        self.synced[found.st_ino] = found.st_mtime_ns
        for path, folder in [*self.unsure.items()]:
            if folder.stat().st_ino == found.st_ino:
                del self.unsure[path]

    def is_synced(self, path: Path) -> bool:
        """Whether the path's content, as it is now, has been pushed to the disk."""
        found = path.stat()
        return self.synced.get(found.st_ino) == found.st_mtime_ns

    def _rename(self, old: Any, new: Any) -> None:
        old, new = Path(old), Path(new)
        if not old.is_symlink() and not new.name.endswith(".tmp"):
            inside = old.rglob("*") if old.is_dir() else ()
            for path in (old, *inside):
                assert self.is_synced(path), f"{path} becomes {new} before it is on the disk"
            self.unsure[new] = new.parent
            self.published.append(new.name)
        self._real["replace"](old, new)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Iterator[Disk]:
    found = Disk(monkeypatch)
    yield found
    assert found.published and not found.unsure, found.unsure


def test_a_file_is_written_whole(disk: Disk, tmp_path: Path) -> None:
    write_whole(tmp_path / "one.json", "{}")
    assert disk.published == ["one.json"] and [*tmp_path.iterdir()] == [tmp_path / "one.json"]


def test_a_write_that_fails_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_whole(tmp_path / "one.json", "old")

    def full(old: Any, new: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "replace", full)
    with pytest.raises(OSError):
        write_whole(tmp_path / "one.json", "new")
    assert [(p.name, p.read_text()) for p in tmp_path.iterdir()] == [("one.json", "old")]


def test_checkpoints_and_their_amendments(disk: Disk, tmp_path: Path) -> None:
    store = Checkpoints(tmp_path / "run" / "checkpoints", rank=0, ranks=1, keep_last=1)
    assert disk.is_synced(tmp_path / "run")
    for step in (1, 2, 2):
        store.save(step, {"w": torch.zeros(4)}, {"score": None, "rank": {}})
        store.wait()
    store.amend(2, {"score": 1.0})
    index, whole = ["checkpoint.json"], ["rank-00000.json", "checkpoint.json"]
    assert disk.published == [*whole, "step-1", *whole, "step-2", *whole, "step-2", *index]
    assert store.steps() == [2]


def test_a_rank_says_that_its_part_is_there_once_it_is_on_the_disk(
    disk: Disk, tmp_path: Path
) -> None:
    store = Checkpoints(tmp_path, rank=1, ranks=2, keep_last=1)
    weights, rename, order = tmp_path / "step-3.tmp" / "rank-00001.safetensors", os.replace, []

    def replace(old: Any, new: Any) -> None:
        order.append(disk.is_synced(weights))
        rename(old, new)

    os.replace = replace  # type: ignore[assignment]
    store.save(3, {"w": torch.zeros(4)}, {"rank": {}})
    store.wait()
    assert disk.published == ["rank-00001.json"] and order == [True]


def test_shards_with_their_manifest_and_tokenizer(disk: Disk, tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "text")
    plan = Plan.read(PLAN.format(corpus=corpus, prepared=tmp_path / "prepared"), catalogue())
    made = prepare(plan)
    assert disk.published.count("manifest.json") == 2
    assert disk.published[-1] == made.directory.name


def test_the_files_of_a_run(disk: Disk, tmp_path: Path) -> None:
    plan = Plan.read(PLAN.format(corpus=tmp_path, prepared=tmp_path), catalogue())
    folder = RunFolder.create(plan.replaced(directory=str(tmp_path / "runs")))
    assert disk.is_synced(tmp_path / "runs")
    folder.write("report", {"status": "done"})
    (folder.path / "metrics.jsonl").write_text('{"step": 1, "wall_s": 1.0}\n{"st')
    assert folder.cut_metrics(1) == 1.0
    assert disk.published == ["report.json", "metrics.jsonl"]


def test_a_fork_of_a_run(disk: Disk, tmp_path: Path) -> None:
    plan = Plan.read(PLAN.format(corpus=tmp_path, prepared=tmp_path), catalogue())
    parent = RunFolder.create(plan.replaced(directory=str(tmp_path / "runs")))
    store = Checkpoints(parent.checkpoints, rank=0, ranks=1, keep_last=1)
    store.save(2, {"w": torch.zeros(4)}, {"score": None, "rank": {}, "plan": plan.dump()})
    store.wait()
    (parent.path / "metrics.jsonl").write_text('{"step": 1, "wall_s": 1.0}\n')
    forked = parent.fork(plan.replaced(directory=str(tmp_path / "runs")), store.folder / "latest")
    assert disk.published[-1] == forked.path.name == "tiny-2"
    assert {"plan.toml", "environment.json"} <= {*disk.published}
    names = sorted(path.name for path in forked.path.iterdir() if path.name != ".lock")
    assert names == [".plan.toml", "checkpoints", "environment.json", "metrics.jsonl", "plan.toml"]
    assert forked.parent is not None and forked.parent["step"] == 2
    assert [p.name for p in (tmp_path / "runs").glob(".*")] == []


def _companions(folder: Path) -> None:
    weights = folder / "weights"
    weights.mkdir()
    (weights / "generation_config.json").write_text("{}")
    (folder / "run").mkdir()
    keep_companions(weights, folder / "run", print)


def _watched(folder: Path) -> None:
    layer = torch.nn.Linear(2, 2)
    loader = [torch.ones(2, 2)]
    with headrace.watch(layer, torch.optim.SGD(layer.parameters()), loader) as watched:
        for batch in watched.loader:
            layer(batch).sum().backward()
    watched.save(folder / "watched.json")


def _exported(folder: Path) -> None:
    config = ModelConfig(vocab=320, dim=32, layers=1, heads=2)
    model = Decoder(config, baseline_parts(config), MaskSpec())
    train_tokenizer(["the mill grinds " * 20], vocab=270).save(file := folder / "tokenizer.json")
    state = {name: p.detach() for name, p in model.named_parameters()}
    export_hf(state, config, file, folder / "exported", sequence_length=16)


def _page(folder: Path) -> None:
    write_page(folder / "page.html", page("a run"))


MADE = {
    "pretrained": _companions,
    "watched.json": _watched,
    "exported": _exported,
    "page.html": _page,
    "cpu.json": lambda folder: Machine.assumed("NVIDIA H100").write(folder / "cpu.json"),
}
"""What else is made current, by its name, and what makes it."""


@pytest.mark.parametrize("name", MADE)
def test_whatever_is_made_current_is_on_the_disk_first(
    disk: Disk, tmp_path: Path, name: str
) -> None:
    MADE[name](tmp_path)
    assert disk.published[-1] == name


def test_a_kill_between_both_copies_of_a_plan_leaves_the_one_that_mends_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`cp .plan.toml plan.toml` is the remedy, so the copy is the one that is new."""
    plan = Plan.read(PLAN.format(corpus=tmp_path, prepared=tmp_path), catalogue())
    folder = RunFolder.create(plan.replaced(directory=str(tmp_path / "runs")))
    folder.write_plan(plan)

    def killed(path: Path, content: str) -> None:
        write_whole(path, content)
        raise KeyboardInterrupt

    monkeypatch.setattr("headrace.train.run_folder.write_whole", killed)
    with pytest.raises(KeyboardInterrupt):
        folder.write_plan(plan.replaced(seed=7))
    assert "seed = 7" in recorded_plan(folder.path).read_text()
    assert "seed = 3" in (folder.path / "plan.toml").read_text()


@pytest.mark.parametrize("code", ["ENOSYS", "ENOLCK", "EOPNOTSUPP"])
def test_a_file_system_without_locks_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, code: str
) -> None:
    import errno
    import fcntl

    def none(descriptor: int, operation: int) -> None:
        raise OSError(getattr(errno, code), os.strerror(getattr(errno, code)))

    monkeypatch.setattr(fcntl, "flock", none)
    with pytest.raises(ConfigError, match="supported are local disks") as told:
        hold_lock(tmp_path / ".lock", wait=False, key="directory")
    assert told.value.remedy.text.startswith("directory=FOLDER")


def test_nothing_imports_what_only_some_systems_have() -> None:
    found = [
        path.name
        for path in Path(files.__file__).parents[1].rglob("*.py")
        for line in path.read_text().splitlines()
        if line in ("import fcntl", "import resource")
    ]
    assert found == []

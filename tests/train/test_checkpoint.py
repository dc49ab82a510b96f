"""Checkpoints: nothing in them runs, no damage goes unnoticed, only whole ones are kept."""

import ast
import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order
from safetensors.torch import save_file

import headrace
from headrace.core.errors import HeadraceError, RunError
from headrace.core.files import sha256_of
from headrace.parallel.boxes import Box, TensorPart
from headrace.train import checkpoint as module
from headrace.train.checkpoint import Checkpoints, Saved

Train = Callable[..., Path]
PACKAGE = Path(headrace.__file__).parent


class Bomb:
    """An object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = str(file)

    def __reduce__(self) -> tuple[Any, ...]:
        return (os.open, (self.file, os.O_CREAT))


@pytest.fixture
def store(tmp_path: Path) -> Checkpoints:
    return Checkpoints(tmp_path / "checkpoints", rank=0, ranks=1, keep_last=2)


def save(store: Checkpoints, step: int, score: float | None = None, value: float = 0.0) -> None:
    store.save(step, {"w": torch.full((4, 3), value)}, {"score": score, "rank": {"rng": {}}})
    store.wait()


def listing(store: Checkpoints) -> list[str]:
    return sorted(p.name for p in store.folder.iterdir())


def link(store: Checkpoints, name: str) -> str:
    return os.readlink(store.folder / name)


# --- nothing runs ---------------------------------------------------------------------------


def test_a_bomb_goes_off_when_it_is_unpickled(tmp_path: Path) -> None:
    pickle.loads(pickle.dumps(Bomb(tmp_path / "boom")))
    assert (tmp_path / "boom").exists()


@pytest.mark.parametrize("how", ["replace", "append", "sealed"])
def test_a_pickle_planted_in_any_file_never_runs(train: Train, tmp_path: Path, how: str) -> None:
    run, boom = train(), tmp_path / "boom"
    bomb = pickle.dumps(Bomb(boom))
    step = run / "checkpoints" / "step-12"
    planted = [p for p in run.rglob("*") if p.is_file() and p.parent.name != "step-8"]
    assert {p.name for p in planted} == {
        "checkpoint.json",
        "rank-00000.safetensors",
        "metrics.jsonl",
        "plan.toml",
        "report.json",
        "tokenizer.json",
        "environment.json",
        "lifetimes.json",
        "data.json",
        ".lock",
        ".plan.toml",
    }
    for path in planted:
        kept = path.read_bytes()
        index = (step / "checkpoint.json").read_bytes()
        path.write_bytes(kept + bomb if how == "append" else bomb)
        if how == "sealed":  # whoever plants it may also make the hashes right
            if path.suffix != ".safetensors":
                path.write_bytes(kept)
                continue
            values = json.loads(index)
            values["parts"][0] |= {"bytes": len(bomb), "sha256": sha256_of(path)}
            (step / "checkpoint.json").write_text(json.dumps(module._sealed(values)))
        in_checkpoint = path.parent == step
        try:
            train("goal.steps=13", resume=True, checkpoint="step-12")
            assert not in_checkpoint, path
        except HeadraceError as error:
            assert path.name in str(error)
            assert in_checkpoint or path.name in ("environment.json", "data.json"), (path, error)
        assert not boom.exists(), path
        path.write_bytes(kept)
        (step / "checkpoint.json").write_bytes(index)
        for forked in {*run.parent.iterdir()} - {run}:  # a run that has gone on is the newest
            shutil.rmtree(forked)


FORBIDDEN_MODULES = {"pickle", "cPickle", "dill", "cloudpickle", "shelve", "marshal", "joblib"}
FORBIDDEN_CALLS = {"torch.load", "torch.save", "np.load", "numpy.load", "pickle.load"}


def unpickling(node: ast.AST) -> bool:
    """Whether a piece of code imports what unpickles, or calls what may."""
    if isinstance(node, ast.Import):
        return bool({alias.name.split(".")[0] for alias in node.names} & FORBIDDEN_MODULES)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").split(".")[0] in FORBIDDEN_MODULES
    if isinstance(node, ast.Attribute):
        text = ast.unparse(node)
        return text in FORBIDDEN_CALLS or "allow_pickle" in text
    return isinstance(node, ast.keyword) and node.arg == "allow_pickle"


def test_no_module_can_unpickle() -> None:
    paths = sorted(PACKAGE.rglob("*.py"))
    found = [
        f"{path.relative_to(PACKAGE)}:{getattr(node, 'lineno', 0)}"
        for path in paths
        for node in ast.walk(ast.parse(path.read_text()))
        if unpickling(node)
    ]
    assert len(paths) > 100 and found == []


@pytest.mark.parametrize(
    "code",
    [
        "import pickle",
        "from dill import loads",
        "torch.load(f)",
        "np.load(f, allow_pickle=True)",
        "f(allow_pickle=False)",
    ],
)
def test_what_unpickles_is_seen(code: str) -> None:
    assert any(unpickling(node) for node in ast.walk(ast.parse(code)))


# --- damage ---------------------------------------------------------------------------------


def damages(path: Path) -> dict[str, Callable[[], None]]:
    """Return ways to damage a file: cut it, flip a bit, or remove it; each by its name."""
    size = path.stat().st_size

    def cut(length: int) -> Callable[[], None]:
        return lambda: os.truncate(path, length)

    def flip(place: int) -> Callable[[], None]:
        def act() -> None:
            raw = bytearray(path.read_bytes())
            raw[place] ^= 1
            path.write_bytes(raw)

        return act

    places = sorted({0, 7, 8, 40, size // 3, size // 2, size - 2, size - 1})
    found = {f"cut to {n}": cut(n) for n in (0, 1, size // 2, size - 1)}
    return found | {f"flip {n}": flip(n) for n in places} | {"gone": path.unlink}


@pytest.mark.parametrize("name", ["checkpoint.json", "rank-00000.safetensors"])
def test_any_damage_is_one_message_that_names_the_file_and_the_way_on(
    train: Train, name: str
) -> None:
    run = train()
    path = run / "checkpoints" / "step-12" / name
    kept = path.read_bytes()
    for how, act in damages(path).items():
        act()
        with pytest.raises(HeadraceError) as told:
            train(resume=True)
        assert name in told.value.message, how
        if how != "gone" or name != "checkpoint.json":
            assert isinstance(told.value, RunError), how
            assert told.value.remedy.text == "--checkpoint step-8", how
        path.write_bytes(kept)
    os.truncate(path, 100)
    before = json.loads((run / "report.json").read_text())["val"][-1]["loss_nats"]
    run = train(resume=True, checkpoint="step-8")  # a new run: the damaged one stays
    assert json.loads((run / "report.json").read_text())["val"][-1]["loss_nats"] == before
    Saved(run / "checkpoints" / "latest")


def test_damage_at_the_command_line_exits_1_without_a_traceback(
    zygote: Any, plan_file: Path
) -> None:
    cwd = plan_file.parent
    assert zygote.run(cwd, "train", "tiny.toml").code == 0
    path = cwd / "runs/tiny/checkpoints/step-12/rank-00000.safetensors"
    os.truncate(path, path.stat().st_size - 8)
    for command in (("train", "tiny.toml", "--resume"), ("sample", "runs/tiny")):
        ended = zygote.run(cwd, *command)
        assert ended.code == 1, ended
        assert "is damaged: rank-00000.safetensors" in ended.err
        assert "--checkpoint step-8" in ended.err
        assert "Traceback" not in ended.err
    assert zygote.run(cwd, "sample", "runs/tiny", "--checkpoint", "step-8").code == 0
    ended = zygote.run(cwd, "train", "tiny.toml", "--resume", "--checkpoint", "step-8")
    assert ended.code == 0, ended.err


def test_deeply_nested_json_is_damage_and_no_crash(store: Checkpoints) -> None:
    save(store, 1)
    (store.folder / "step-1" / "checkpoint.json").write_text("[" * 100_000)
    with pytest.raises(RunError, match=r"damaged: checkpoint\.json"):
        Saved(store.folder / "step-1")
    Checkpoints(store.folder, rank=0, ranks=1, keep_last=2)


def test_the_way_on_is_the_newest_other_checkpoint(store: Checkpoints) -> None:
    store.keep_last = 9
    for step in (9, 10, 100):
        save(store, step)
    os.truncate(store.folder / "step-100" / "rank-00000.safetensors", 3)
    with pytest.raises(RunError) as told:
        Saved(store.folder / "latest")
    assert told.value.remedy.text == "--checkpoint step-10"


def test_a_tensor_of_another_shape_or_name_is_refused(store: Checkpoints) -> None:
    save(store, 1)
    saved = Saved(store.folder / "step-1")
    with pytest.raises(RunError, match=r"w has shape \(3, 4\); .* holds \(4, 3\)"):
        saved.fill_("w", torch.zeros(3, 4))
    with pytest.raises(RunError, match="holds no tensor 'v'"):
        saved.fill_("v", torch.zeros(4, 3))


def test_pieces_that_leave_a_part_open_are_damage(store: Checkpoints) -> None:
    """As those of ranks whose files the index does not name."""
    half = TensorPart(torch.ones(2, 3), (4, 3), Box((2, 0), (2, 3)), True)
    store.save(1, {"w": half}, {})
    store.wait()
    saved = Saved(store.folder / "step-1")
    with pytest.raises(RunError, match="w covers 6 of 12 numbers"):
        saved.fill_("w", torch.zeros(4, 3))
    below = torch.zeros(1, 3)
    saved.fill_("w", TensorPart(below, (4, 3), Box((3, 0), (1, 3)), True))
    assert below.eq(1).all()


# --- which are kept -------------------------------------------------------------------------


def test_the_last_k_and_the_best_are_kept(store: Checkpoints) -> None:
    for step, score in enumerate([3.0, 1.0, 2.0, None, 2.5], start=1):
        save(store, step, score)
    assert listing(store) == ["best", "latest", "step-2", "step-4", "step-5"]
    assert (link(store, "best"), link(store, "latest")) == ("step-2", "step-5")
    save(store, 6, 0.5)
    assert listing(store) == ["best", "latest", "step-5", "step-6"]
    assert link(store, "best") == "step-6"


def test_without_scores_there_is_no_best(store: Checkpoints) -> None:
    save(store, 1)
    assert listing(store) == ["latest", "step-1"]


def test_the_same_step_again_replaces_it(store: Checkpoints) -> None:
    save(store, 1, value=1.0)
    save(store, 1, value=2.0)
    tensor = torch.zeros(4, 3)
    Saved(store.folder / "step-1").fill_("w", tensor)
    assert tensor.eq(2).all()
    assert listing(store) == ["latest", "step-1"]


def test_values_can_be_amended_and_tensors_stay(store: Checkpoints) -> None:
    save(store, 1, value=1.0)
    save(store, 2, value=2.0)
    store.amend(1, {"score": 1.0, "rank": {}})
    saved, tensor = Saved(store.folder / "step-1"), torch.zeros(4, 3)
    saved.fill_("w", tensor)
    assert tensor.eq(1).all() and saved.values["score"] == 1.0 and "rank" not in saved.values
    assert (link(store, "best"), link(store, "latest")) == ("step-1", "step-2")
    save(store, 3)
    save(store, 4)
    assert listing(store) == ["best", "latest", "step-1", "step-3", "step-4"]
    store.amend(4, {"score": 0.5})
    assert listing(store) == ["best", "latest", "step-3", "step-4"]


def test_what_a_kill_left_is_swept_and_links_are_put_right(store: Checkpoints) -> None:
    for step, score in ((1, 3.0), (2, 2.0)):
        save(store, step, score)
    for name in ("step-3.tmp", "step-0.old.tmp"):
        shutil.copytree(store.folder / "step-1", store.folder / name)
    for name in ("latest", "best"):  # killed after the rename and before the links
        (store.folder / name).unlink()
        (store.folder / name).symlink_to("step-1")
    again = Checkpoints(store.folder, rank=0, ranks=1, keep_last=2)
    assert listing(again) == ["best", "latest", "step-1", "step-2"]
    assert (link(again, "best"), link(again, "latest")) == ("step-2", "step-2")


def test_a_copy_that_followed_the_links_goes_on(store: Checkpoints, tmp_path: Path) -> None:
    for step, score in ((1, 2.0), (2, 3.0)):
        save(store, step, score, value=float(step))
    copy = Path(shutil.copytree(store.folder, tmp_path / "copy"))  # as scp -r and buckets do
    assert not (copy / "latest").is_symlink()
    shutil.rmtree(copy / "step-1")  # of which `best` is the only one left then
    again = Checkpoints(copy, rank=0, ranks=1, keep_last=2)
    assert listing(again) == ["best", "latest", "step-1", "step-2"]
    assert (link(again, "best"), link(again, "latest")) == ("step-1", "step-2")
    tensor = torch.zeros(4, 3)
    Saved(copy / "step-1").fill_("w", tensor)
    assert tensor.eq(1).all()


def test_a_kill_while_an_old_one_is_removed_leaves_no_half_checkpoint(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    save(store, 1)
    save(store, 2)
    monkeypatch.setattr(module.shutil, "rmtree", lambda path: (path / module.INDEX).unlink())
    save(store, 3)
    assert "step-1.old.tmp" in listing(store) and "step-1" not in listing(store)
    monkeypatch.undo()
    Checkpoints(store.folder, rank=0, ranks=1, keep_last=2)
    assert listing(store) == ["latest", "step-2", "step-3"]


def test_a_checkpoint_is_of_the_moment_of_saving(
    store: Checkpoints, monkeypatch: pytest.MonkeyPatch
) -> None:
    import threading

    go = threading.Event()

    def late(*args: Any, **kwargs: Any) -> None:
        assert go.wait(10)
        save_file(*args, **kwargs)

    monkeypatch.setattr(module, "save_file", late)
    tensors = {"a": torch.zeros(3), "b": torch.zeros(2, 3).T, "c": torch.tensor(0.0)}
    store.save(1, tensors, {"rank": {}})
    for tensor in tensors.values():
        tensor.add_(1)
    go.set()
    store.wait()
    saved = Saved(store.folder / "step-1")
    for name, tensor in tensors.items():
        saved.fill_(name, tensor)
        assert tensor.eq(0).all(), name


def test_a_rank_file_that_is_missing_is_named(store: Checkpoints) -> None:
    save(store, 1)
    path = store.folder / "step-1" / "checkpoint.json"
    values = json.loads(path.read_text())
    values["parts"].append({**values["parts"][0], "file": "rank-00001.safetensors"})
    path.write_text(json.dumps(module._sealed(values)))
    with pytest.raises(RunError, match=r"rank-00001\.safetensors: it is missing"):
        Saved(store.folder / "step-1")


def test_a_path_in_the_index_cannot_leave_the_folder(store: Checkpoints, tmp_path: Path) -> None:
    save(store, 1)
    path = store.folder / "step-1" / "checkpoint.json"
    values = json.loads(path.read_text())
    shutil.copy(store.folder / "step-1" / "rank-00000.safetensors", tmp_path / "other.safetensors")
    values["parts"][0]["file"] = "../../other.safetensors"
    path.write_text(json.dumps(module._sealed(values)))
    with pytest.raises(RunError, match=r"other\.safetensors: it is missing"):
        Saved(store.folder / "step-1")


# --- a rank that ends ------------------------------------------------------------------------


def test_a_rank_that_ended_before_its_part_is_named_at_once(tmp_path: Path) -> None:
    folder = tmp_path / "checkpoints"
    first = Checkpoints(folder, rank=0, ranks=2, keep_last=2)
    other = Checkpoints(folder, rank=1, ranks=2, keep_last=2)
    assert not first.has_ended(1)
    for store in (other, first):
        store.save(1, {f"w{store.rank}": torch.zeros(3)}, {"score": None, "rank": {}})
    first.wait()
    assert first.steps() == [1]
    first.save(2, {"w0": torch.zeros(3)}, {"score": None, "rank": {}})
    other.wait()
    other._alive.release()  # as the system does when a process ends
    with pytest.raises(module.RankGone, match=in_order("rank 1", "step-2")) as told:
        first.wait()
    assert "step-1 is intact" in told.value.message
    assert first.steps() == [1]

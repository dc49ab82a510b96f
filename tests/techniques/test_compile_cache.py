"""The compile cache: found again by another build and another process, and whose folder it is."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import tells

from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.compile.compile_cache import CompileCache, kept_in, what_is_wrong

COMPILE = "techniques.torch_compile={}"
Make = Callable[..., Build]


def test_what_was_made_is_found_again(make_tiny: Make, tmp_path: Path) -> None:
    """A product of matrices alone, for which inductor needs no C++ compiler."""
    from torch._inductor.runtime.cache_dir_utils import cache_dir

    build, folder = make_tiny(), tmp_path / "made" / "here"
    technique = CompileCache(directory=str(folder))
    technique.apply(build)
    assert not technique.active(build).active
    before, found = cache_dir(), []
    triton = os.environ.get("TRITON_CACHE_DIR")
    for _ in range(2):
        torch.compiler.reset()
        build.notes.clear()
        build.runtime.clear()
        technique.apply(build)
        with build.runtime[0]():
            assert cache_dir() == str(folder)
            x = torch.ones(4, 4)
            assert torch.compile(lambda x: x @ x)(x).equal(x @ x)
            assert os.environ["TRITON_CACHE_DIR"] == str(folder / "triton")
        found.append(technique.active(build))
        assert cache_dir() == before and os.environ.get("TRITON_CACHE_DIR") == triton
    first, second = (evidence.numbers for evidence in found)
    assert all(evidence.active for evidence in found)
    assert first["misses"] > 0 == first["hits"] and second["hits"] > 0 == second["misses"]
    assert folder.stat().st_mode & 0o777 == 0o700


def test_what_is_bypassed_is_no_evidence(make_tiny: Make, tmp_path: Path) -> None:
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor

    build, technique = make_tiny(), CompileCache(directory=str(tmp_path / "cache"))
    technique.apply(build)
    torch.compiler.reset()
    off = inductor.patch(fx_graph_cache=False), autograd.patch(enable_autograd_cache=False)
    with build.runtime[0](), off[0], off[1]:
        torch.compile(lambda x: x @ x)(torch.ones(5, 5))
    assert not technique.active(build).active


def test_runs_no_code_that_others_could_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "cache"
    assert not what_is_wrong(folder)
    folder.mkdir(mode=0o700)
    assert not what_is_wrong(folder)
    for mode in (0o770, 0o702, 0o750, 0o711, 0o755):
        folder.chmod(mode)
        assert tells(what_is_wrong(folder), "other users", folder, f"{mode:04o}")
        with pytest.raises(ConfigError, match="chmod 700"):
            kept_in(folder, {"before": None}).__enter__()
    folder.chmod(0o700)
    (tmp_path / "file").touch()
    assert "not a folder" in what_is_wrong(tmp_path / "file")
    monkeypatch.setattr("os.getuid", lambda: folder.stat().st_uid + 1)
    assert "belongs to user" in what_is_wrong(folder)


def test_says_what_to_do_where_nothing_can_be_written(
    tiny_plan: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write anywhere, so the system's answer is made up; a file in the way is real."""
    context = make_context(tiny_plan(COMPILE), torch.device("cpu"))
    (tmp_path / "there").mkdir(mode=0o700)
    for inside, asked in (("there", tmp_path / "there"), ("a/b", tmp_path)):
        with monkeypatch.context() as patched:
            patched.setattr(os, "access", lambda path, mode, no=asked: path != no)
            answer = CompileCache(directory=str(tmp_path / inside)).supports(context)
        assert isinstance(answer, Unsupported) and str(asked) in answer.reason
        assert "techniques.compile_cache.directory=" in answer.remedy.text
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match="cannot be made") as caught:
        kept_in(tmp_path / "file" / "cache", {"before": None}).__enter__()
    assert "techniques.compile_cache.directory=" in caught.value.remedy.text


def test_says_where_it_keeps_something(tiny_plan: Callable[..., Any], tmp_path: Path) -> None:
    def answer(technique: CompileCache, *keys: str) -> Supported | Unsupported:
        return technique.supports(make_context(tiny_plan(*keys), torch.device("cpu")))

    there = partial(CompileCache, directory=str(tmp_path / "cache"))
    assert isinstance(answer(there(), COMPILE), Supported)
    open_to_all = tmp_path / "open"
    open_to_all.mkdir()
    open_to_all.chmod(0o777)
    for technique, keys, why in (
        (there(), [], "nothing is compiled"),
        (there(), ["techniques.torch_compile.backend=aot_eager"], "'aot_eager'"),
        (there(directory=str(tmp_path / "runs" / "a" / "cache")), [COMPILE], "handed on"),
        (there(directory=str(open_to_all)), [COMPILE], "other users may reach"),
    ):
        found = answer(technique, *keys)
        assert isinstance(found, Unsupported) and why in found.reason and found.remedy.text
    assert CompileCache().folder() == Path.home() / ".cache" / "headrace" / "compile"


def test_refuses_before_anything_is_made(make_tiny: Make) -> None:
    with pytest.raises(UnsupportedError, match="nothing is compiled"):
        make_tiny("techniques.compile_cache={}")


@pytest.mark.slow
def test_a_second_process_compiles_nothing(tmp_path: Path, plan_file: Path, run_cli: Any) -> None:
    given = [
        COMPILE,
        f"techniques.compile_cache.directory={tmp_path / 'cache'}",
        "goal.steps=1",
        "schedule.steps=9",
        "checkpoint.every_steps=0",
    ]
    found = []
    for name in ("first", "second"):
        ended = run_cli(tmp_path, "train", str(plan_file), f"name={name}", *given, timeout_s=500)
        assert ended.code == 0, ended.err
        report = json.loads((tmp_path / "runs" / name / "report.json").read_text())
        found.append(report["techniques"]["compile_cache"]["numbers"])
    first, second = found
    assert first["misses"] > 0 == first["hits"]
    assert second["hits"] > 0 == second["misses"] == second["bypassed"]

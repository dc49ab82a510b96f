"""Provide a tiny corpus, a tiny plan, and three ways to run it: here, forked, and for real."""

import gc
import json
import os
import signal
import site
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from latecomer import fewer_bytes as fewer_bytes  # a fixture
from longest import first_longest, mark_slow
from tiny import PLAN, keep_rates, save_weights, write_corpus

from headrace.cli.catalogue import catalogue
from headrace.plan.plan import Plan

if not torch.cuda.is_available():  # read when triton is imported: its kernels run on the host
    os.environ.setdefault("TRITON_INTERPRET", "1")


# Numba compiles in each process what cleans text: 5 s when it optimizes, a fifth without.
os.environ |= {"NUMBA_OPT": "0", "NUMBA_LOOP_VECTORIZE": "0", "NUMBA_SLP_VECTORIZE": "0"}


for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:  # pytest runs under nohup, or in a background
        signal.signal(number, usual)


def pytest_addoption(parser: pytest.Parser) -> None:
    """`make test DATA=DIR` passes a folder of real text."""
    parser.addoption("--data", type=Path, help="a folder of real text for tests that want some")
    parser.addoption("--matrix", type=Path, help="where tests of pairs write their outcome")


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, Any, Any]:
    """Collecting makes a million objects, none of them garbage: nothing looks for any."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


@pytest.hookimpl(wrapper=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> Generator[None, None, None]:
    """Begin with what takes longest; xdist keeps that order with `--no-loadscope-reorder`."""
    mark_slow(items)
    yield
    first_longest(items)


def pytest_sessionfinish() -> None:
    """A worker is killed some seconds after its last test: what it covered is kept before."""
    coverage = sys.modules.get("coverage")
    if coverage is not None and (running := coverage.Coverage.current()) is not None:
        running.save()


@pytest.fixture(scope="session")
def real_text(request: pytest.FixtureRequest) -> Path:
    """The folder that --data names."""
    folder = request.config.getoption("--data")
    if folder is None:
        pytest.skip("needs real text: make test DATA=DIR")
    return folder


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Let torch use one thread: the tests check exactness, not speed, and share the machine."""
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def known_home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A user's folder in which the rates of this processor are kept, as after a probe."""
    home = tmp_path_factory.mktemp("home")
    keep_rates(home)
    return home


@pytest.fixture(scope="session", autouse=True)
def activated() -> Iterator[None]:
    """The commands of remedies run where `source .venv/bin/activate` has been typed."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PATH", str(Path(sys.executable).parent), prepend=os.pathsep)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_probes(one_thread: None, known_home: Path) -> Iterator[None]:
    """No test measures a device for 20 s by accident, nor reads what the tester measured.

    What other tools keep in the tester's own folder stays where it is.
    """
    own = Path.home()
    kept = {
        "TRITON_CACHE_DIR": own / ".triton" / "cache",
        "PYTHONUSERBASE": site.getuserbase(),
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, folder in kept.items():
            patch.setenv(name, os.environ.get(name, str(folder)))
        patch.setenv("HOME", str(known_home))
        yield


@pytest.fixture(autouse=True)
def no_probe_here(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A test that would measure a device without being about that fails."""

    def refused(*_: Any, **__: Any) -> None:
        raise AssertionError("this test measures a device: give it a HOME with `keep_rates`")

    if "quick_probe" not in request.fixturenames:
        monkeypatch.setattr("headrace.probes.at_hand.measured", refused)


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a test measure, for a moment."""
    monkeypatch.setattr("headrace.probes.at_hand.QUICK_S", {"cpu": 1e-9, "cuda": 1e-9})


@pytest.fixture(scope="module", autouse=True)
def own_garbage() -> Iterator[None]:
    """A guard, a trial and others look for garbage; among what other files left it takes a second.

    On a GPU that is memory, which is to be found.
    """
    if torch.cuda.is_available():
        yield
        return
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="session", autouse=True)
def short_samples() -> Iterator[None]:
    """A run ends with a few words: each takes a pass of the model, and a test trains hundreds."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("headrace.report.conclude.SAMPLE_TOKENS", 8)
        yield


@pytest.fixture(scope="session", autouse=True)
def no_wait_for_the_disk() -> Iterator[None]:
    """Keep what is written in memory: only a power cut shows the difference, and none comes.

    The processes of a zygote do the same. `test_power_loss.py` watches the calls themselves.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "fsync", lambda descriptor: None)
        yield


@pytest.fixture(scope="session")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder of text that is written once for all tests."""
    return write_corpus(tmp_path_factory.mktemp("text") / "corpus")


@pytest.fixture(scope="session")
def prepared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where prepared shards are shared by all tests."""
    return tmp_path_factory.mktemp("prepared")


@pytest.fixture
def plan_file(tmp_path: Path, corpus: Path, prepared_folder: Path) -> Path:
    """tiny.toml in a folder of its own, where runs go too."""
    path = tmp_path / "tiny.toml"
    path.write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    return path


@pytest.fixture
def tiny_plan(plan_file: Path) -> Callable[..., Plan]:
    """Return a function that makes the tiny plan with `key=value` overrides."""

    def make(*overrides: str) -> Plan:
        runs = f"directory={plan_file.parent / 'runs'}"
        return Plan.read(plan_file.read_text(), catalogue(), overrides=[runs, *overrides])

    return make


@pytest.fixture
def given(tiny_plan: Callable[..., Plan], tmp_path: Path) -> Callable[..., str]:
    """Save the tiny plan's model, with `key=value` overrides; returns the key that starts there."""

    def save(*overrides: str) -> str:
        return f"model.pretrained='{save_weights(tiny_plan(*overrides), tmp_path / 'given')}'"

    return save


@pytest.fixture
def train(tiny_plan: Callable[..., Plan]) -> Callable[..., Path]:
    """Train the tiny plan in this process; returns the run's folder."""
    from headrace.train import train as trainer

    def run(*overrides: str, resume: bool = False, checkpoint: str | None = None) -> Path:
        plan = tiny_plan(*overrides)
        return trainer.run(plan, resume=resume, checkpoint=checkpoint).folder

    return run


@dataclass
class Finished:
    """Say how a process ended: its exit code and both of its outputs."""

    code: int
    out: str
    err: str


class Child:
    """A process that the zygote has forked, to signal and to wait for."""

    def __init__(self, zygote: "Zygote", pid: int, log: Path) -> None:
        self._zygote, self.pid, self._log = zygote, pid, log

    def send(self, number: signal.Signals) -> None:
        """Send it a signal."""
        os.kill(self.pid, number)

    def wait(self) -> Finished:
        """Wait for its end; a negative code is the signal that killed it."""
        code = self._zygote.ask({"wait": self.pid})
        texts = (self._log.with_suffix(s).read_text() for s in (".out", ".err"))
        return Finished(code, *texts)


class Zygote:
    """Start processes by asking one that has imported everything to fork."""

    def __init__(self, folder: Path) -> None:
        self._folder, self._count = folder, 0
        self._process = self._begin()
        self._asks = False

    @staticmethod
    def _begin() -> subprocess.Popen[str]:
        file = str(Path(__file__).with_name("zygote.py"))
        pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
        return subprocess.Popen([sys.executable, file], text=True, env=_environment(), **pipes)

    def ask(self, request: dict[str, Any]) -> int:
        """Ask once and return the answer; a question that was cut off ends the process for good."""
        if self._asks:
            self._process.kill()
            self._process.wait()
            self._process = self._begin()
        assert self._process.stdin and self._process.stdout
        assert self._process.poll() is None, f"the zygote was ended: {self._process.returncode}"
        self._asks = True
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        answer = json.loads(self._process.stdout.readline())
        self._asks = False
        return answer

    def _start(self, cwd: Path, env: dict[str, str], **what: Any) -> Child:
        self._count += 1
        log = self._folder / str(self._count)
        files = {"out": str(log.with_suffix(".out")), "err": str(log.with_suffix(".err"))}
        return Child(self, self.ask({"cwd": str(cwd), "env": env, **files, **what}), log)

    def start(self, cwd: Path, *argv: str, env: dict[str, str] | None = None) -> Child:
        """Start `headrace ARGV` in a folder, without waiting for its end."""
        return self._start(cwd, env or {}, argv=argv)

    def run(self, cwd: Path, *argv: str) -> Finished:
        """Run `headrace ARGV` in a folder, and return how it ended."""
        return self.start(cwd, *argv).wait()

    def ranks(self, count: int, cwd: Path, *argv: str) -> list[Finished]:
        """`headrace ARGV` in `count` processes that form one world, as torchrun starts them."""
        return [c.wait() for c in [self.start(cwd, *argv, env=e) for e in self.world(count)]]

    def call(self, count: int, cwd: Path, file: Path, function: str, **arguments: Any) -> None:
        """Call a function of a Python file in `count` processes that form one world."""
        what = [str(file), function, arguments]
        children = [self._start(cwd, env, call=what) for env in self.world(count)]
        for ended in [c.wait() for c in children]:
            assert ended.code == 0, ended.err

    def world(self, count: int) -> list[dict[str, str]]:
        """What torchrun would set in the environment of each of `count` processes."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = str(probe.getsockname()[1])
        shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
        return [{**shared, "RANK": str(r), "LOCAL_RANK": str(r)} for r in range(count)]

    def close(self) -> None:
        """End it."""
        assert self._process.stdin
        self._process.stdin.close()
        self._process.wait()


def _environment() -> dict[str, str]:
    """Also where the modules lie that tests share, as pytest has it."""
    here = Path(__file__).parent
    given = [path] if (path := os.environ.get("PYTHONPATH")) else []
    shared = os.pathsep.join([*map(str, (here, here / "contract", here / "distributed")), *given])
    tame = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    tame["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # to ask for a GPU keeps forked ranks from it else
    return {**os.environ, **tame, "PYTHONPATH": shared}


@pytest.fixture(scope="session")
def zygote(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Zygote]:
    """Provide a starter of real processes that begin in milliseconds."""
    server = Zygote(tmp_path_factory.mktemp("logs"))
    yield server
    server.close()


@pytest.fixture(scope="module")
def four_steps(
    zygote: Zygote, tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Path:
    """A folder with tiny.toml and a run of four steps, which a file of tests has for itself."""
    cwd = tmp_path_factory.mktemp("trained")
    (cwd / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    words = ("goal.steps=4", "checkpoint.every_steps=2", "guard=false")
    ended = zygote.run(cwd, "train", "tiny.toml", *words)
    assert ended.code == 0, ended.err
    return cwd


@pytest.fixture(scope="session")
def run_cli() -> Callable[..., Finished]:
    """`python -m headrace ARGV` in a process of its own, as a user starts it."""

    def run(cwd: Path, *argv: str, timeout_s: float = 120) -> Finished:
        ended = subprocess.run(
            [sys.executable, "-m", "headrace", *argv],
            cwd=cwd,
            env=_environment(),
            capture_output=True,
            text=True,
            timeout=timeout_s,
            check=False,
        )
        return Finished(ended.returncode, ended.stdout, ended.stderr)

    return run


def wait_until(true: Callable[[], bool], *, timeout_s: float = 60) -> None:
    """Poll until something is true."""
    give_up = time.monotonic() + timeout_s
    while not true():
        assert time.monotonic() < give_up, "it did not happen in time"
        time.sleep(0.0005)


@pytest.fixture(scope="session", name="wait_until")
def _wait_until() -> Callable[..., None]:
    return wait_until

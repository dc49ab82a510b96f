"""The wheel, in an environment without the source tree, trains; the sdist's tests are collected."""

import os
import subprocess
import sys
import sysconfig
import tarfile
import venv
from collections.abc import Callable
from email.message import Message
from email.parser import Parser
from pathlib import Path
from zipfile import ZipFile

import pytest
from test_release_files import DIST, REPOSITORY

import headrace

ROOT = Path(__file__).parents[2]
BUILD = (
    "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
)
SHORT = (
    *("device=cpu", "model.dim=16", "model.layers=1", "model.heads=2", "model.ffn=32"),
    *("data.vocab=300", "data.sequence_length=16", "batch.tokens=128"),
    *("goal.steps=4", "eval.every_steps=2", "eval.tokens=512"),
)
Say = Callable[..., str]

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the wheel and the sdist as a release does, with the packages that are here."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("dist")
    DIST["prepare"](ROOT, source, REPOSITORY, "v1.2.3")
    for kind in ("build_sdist", "build_wheel"):
        command = [sys.executable, "-c", BUILD, kind, str(out)]
        ended = subprocess.run(command, cwd=source, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stderr
    return out


@pytest.fixture(scope="module")
def say(built: Path, tmp_path_factory: pytest.TempPathFactory) -> Say:
    """Install the wheel into a bare environment; what it depends on is lent from this one."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    python = folder / "bin" / "python"
    (wheel,) = built.glob("*.whl")
    words = ["--python", str(python), "install", "--no-deps", "--no-index", "--quiet", str(wheel)]
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PYTHONHOME")}
    subprocess.run([sys.executable, "-m", "pip", *words], check=True, cwd=folder, env=clean)
    site = next((folder / "lib").glob("python*/site-packages"))
    (site / "lent.pth").write_text(sysconfig.get_path("purelib"))

    def run(program: str, *argv: str) -> str:
        ended = subprocess.run(
            [str(folder / "bin" / program), *argv],
            cwd=folder,
            env=clean,
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout

    return run


def metadata(wheel: Path) -> Message:
    """Return what a wheel says of itself."""
    with ZipFile(wheel) as files:
        (name,) = (one for one in files.namelist() if one.endswith(".dist-info/METADATA"))
        return Parser().parsestr(files.read(name).decode())


def test_the_wheel_holds_the_package_and_nothing_else(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    with ZipFile(wheel) as files:
        inside = {n for n in files.namelist() if ".dist-info/" not in n}
    listed = [Path(name) for name in DIST["tracked"](ROOT) if name.startswith("headrace/")]
    assert inside == {path.as_posix() for path in listed}
    says = metadata(wheel)
    assert says["Version"] == headrace.__version__ and says["License-Expression"] == "Apache-2.0"
    assert f"{REPOSITORY}/raw/v1.2.3/docs/report.png" in says.get_payload()
    assert any(url.startswith("Changelog, ") for url in says.get_all("Project-URL", []))


def test_a_bare_environment_trains(say: Say) -> None:
    assert say("headrace", "--version") == f"headrace {headrace.__version__}\n"
    where = say("python", "-c", "import headrace; print(headrace.__file__)")
    assert "site-packages" in where and str(ROOT) not in where
    assert {"demo", "160m", "1b", "7b"} <= {*say("headrace", "list", "--recipes").split()}
    say("headrace", "train", "demo", *SHORT)
    page = "print(open('runs/demo/report.html').read().count('<section'))"
    assert int(say("python", "-c", page)) > 3
    assert say("headrace", "doctor", "demo")
    assert "fits" in say("headrace", "plan", "1b", "--device-name", "NVIDIA H200")


def test_the_tests_of_the_sdist_are_collected(built: Path, tmp_path: Path) -> None:
    (archive,) = built.glob("*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path, filter="data")
    (source,) = tmp_path.iterdir()
    here = {**os.environ, "PYTHONPATH": str(source)}
    ended = subprocess.run(
        [sys.executable, "-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=source,
        env=here,
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-2000:]
    few = ("tests/architecture/test_top.py", "tests/cli/test_version.py", "tests/docs/test_log.py")
    run = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *few]
    ended = subprocess.run(run, cwd=source, env=here, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stdout[-2000:]

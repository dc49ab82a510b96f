"""A name in another case, or with other dashes, leads to the command with the right one."""

import shlex
from pathlib import Path

import pytest
from shell import after, run

WORDS = (
    "explain demo device=cpu --with Muon",
    "explain demo device=cpu --with Selective-Checkpoint",
    "explain demo device=cpu --without MUON",
    "explain demo device=cpu techniques.Muon.momentum=0.9",
    "explain demo device=cpu techniques.muon.Momentum=0.9",
    "explain demo device=cpu Techniques.muon={}",
    "explain demo device=cpu model.family=GPT-2",
    "explain demo device=cpu model.precision=BF16",
    "explain demo device=CPU batch.micro-sequences=4",
    "explain demo device=cpu --with soap",
    "explain Muon",
    "explain z-loss",
    "Explain muon",
    "list --Families",
    "eval Demo",
    "doctor DEMO",
    "report Demo",
    "eval demo --checkpoint Best",
    "eval demo --checkpoint LATEST",
    "sample demo --tokens 0",
    "sample demo --tokens few",
    "sample demo --tokens 2 --top-p 7",
    "sample demo --tokens 2 --top-p -1",
    "sample demo --tokens 2 --top-k -1",
    "sample demo --tokens 2 --temperature -1",
    "export demo --to HF --output out",
    "plan demo --device-name h-200",
    "plan demo --Device-Name H200",
    "plan demo --device-name H200 --for Memory model.layers=2",
)


def folded(word: str) -> str:
    """Return the key of an override in lower case with underscores for dashes."""
    return word.partition("=")[0].casefold().replace("-", "_") if "=" in word else word


@pytest.mark.parametrize("words", WORDS)
def test_the_right_name_is_offered(
    words: str, workshop: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "runs").symlink_to(workshop / "runs")
    monkeypatch.chdir(tmp_path)
    argv, told = shlex.split(words), None
    for turn in range(3):  # some have two wrong words
        told = run(argv)
        assert bool(told.code) or turn, "nothing is wrong"
        if not told.code:
            return
        offered = shlex.split(told.remedy.partition("; ")[0])
        meant = {folded(word) for word in offered if "=" in word}
        argv = after([word for word in argv if folded(word) not in meant], offered)
    raise AssertionError((argv, told))

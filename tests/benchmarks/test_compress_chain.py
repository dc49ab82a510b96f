"""A recipe that was run whole becomes a row with what each of its hops cost."""

import json
import sys
from pathlib import Path
from typing import Any

import compress
import compress_chain
import pytest
from programs import rows

HOP = {"peak_bytes": None, "seconds": 30.0, "command": "headrace ...", "made": "x"}
HOPS = [
    HOP | dict(zip(compress_chain.MEASURED, values, strict=False)) | {"name": name}
    for name, values in (
        ("run", (2.0, 4000, None, 100.0)),
        ("distil", (2.2, 2000, 3.0, 180.0)),
        ("quantize", (2.21, 500, 0.25, 170.0)),
        ("export", (2.1011, 600, 1e-5, 300.0, 30.0, 2.1)),
    )
]
FEW = ("--shape", "tiny", "--steps", "3", "--more", "2", "--by", "8%", "--tokens", "512")


def followed(patch: pytest.MonkeyPatch, folder: Path, *words: str) -> dict[str, Any]:
    """Run the program, and return the last row that it writes."""
    places = ("--work", str(folder / "work"), "--results", str(folder))
    patch.setattr(sys, "argv", ["compress_chain.py", *words, *FEW, *places])
    compress_chain.main()
    return rows(folder, "compress")[-1]


def test_a_finished_chain_becomes_a_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[str, ...]] = []

    def made(work: Path, *words: str) -> dict[str, Any]:
        asked.append(words)
        name = dict(word.split("=", 1) for word in words if word.startswith("name=")).get("name")
        out = work / (f"runs/{name}" if name else words[words.index("--output") + 1])
        out.mkdir(parents=True)
        (out / "hops.json").write_text(json.dumps(HOPS))
        return {}

    monkeypatch.setattr(compress, "headrace", made)
    row = followed(monkeypatch, tmp_path, "--recipe", "inference-speed", "--seeds", "2")
    assert [words[0] for words in asked] == ["train", "compress"] * 2
    assert "model.family=gpt2" in asked[0] and "goal.steps=2" in asked[1]
    values = {name: one["value"] for name, one in row["metrics"].items()}
    assert values == pytest.approx(
        {
            "kept": 2.21 / 2,
            "moved": 2.1011 / 2.1 - 1,
            "size": 0.15,
            "decoding": 3.0,
            "drift": 1e-5,
            "minutes": 2.0,
        }
    )
    assert row["kind"] == "chain" and row["n"] == 2 and row["met"]
    assert row["shape"] == "tiny, 1,000 weights" and [*row["hops"][1]][-1] == "export"
    followed(monkeypatch, tmp_path, "--recipe", "inference-speed", "--seeds", "2")
    assert len(asked) == 4, "what is there is read again"


def test_a_chain_that_was_stopped_says_what_to_delete(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compress, "trained", lambda args, name, *words: name)
    (work := tmp_path / "work" / "edge-0").mkdir(parents=True)
    (work.parent / "made_of.json").write_text(
        '{"text": null, "shape": "tiny", "steps": 3, "more": 2, "by": "8%", "tokens": 512}'
    )
    (work / "hops.json").write_text(json.dumps(HOPS[:2]))
    with pytest.raises(SystemExit, match="ends with the hop distil; try: rm -r"):
        followed(monkeypatch, tmp_path, "--recipe", "edge", "--seeds", "1")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "package"), [("edge", "executorch"), ("inference-speed", "onnx")]
)
def test_a_tiny_chain_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recipe: str, package: str
) -> None:
    pytest.importorskip(package, reason=f"pip install 'headrace[{package}]'")
    row = followed(monkeypatch, tmp_path, "--recipe", recipe)
    (hops,) = row["hops"]
    middle = ["prune", "recover"] if recipe == "edge" else ["convert"]
    assert [*hops] == ["run", "distil", *middle, "quantize", "export"]
    assert row["metrics"]["size"]["value"] < 0.5 and row["recipe"] == recipe

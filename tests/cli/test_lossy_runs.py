"""A run whose tokenizer changes text: every verb tells, and one of before the rule still opens."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from typer.testing import CliRunner

from headrace.cli.app import app

SAID = "data.lossy_tokenizer=true"


def spoken(*argv: str, code: int = 0) -> Any:
    ended = CliRunner().invoke(app, [*argv, "--json"], prog_name="headrace")
    assert ended.exit_code == code, ended.output
    return json.loads(ended.stdout)


def trained(*argv: str) -> tuple[dict[str, Any], str]:
    """Return the report of `headrace train ARGV`, and what it printed for a person."""
    ended = CliRunner().invoke(app, ["train", *argv], prog_name="headrace")
    assert ended.exit_code == 0, ended.output
    name = next(word for word in argv if word.startswith("name=")).removeprefix("name=")
    report = json.loads((Path("runs") / name / "report.json").read_text())
    return report, " ".join(ended.stderr.split())


def metaspace(file: Path) -> Path:
    """Write a tokenizer that decodes its probes exactly, but reads U+2581 as a space."""
    vocab = {"<s>": 0, **{f"<0x{b:02X}>": b + 1 for b in range(256)}, "a": 257, "\u2581": 258}
    theirs = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    back = decoders.Metaspace(prepend_scheme="first")
    theirs.decoder = decoders.Sequence([decoders.ByteFallback(), back])
    theirs.add_special_tokens(["<s>"])
    theirs.save(str(file))
    return file


@pytest.fixture(scope="module", params=["probe", "text"])
def lossy(
    request: pytest.FixtureRequest,
    tmp_path_factory: pytest.TempPathFactory,
    workshop: Path,
    tiny_demo: list[str],
) -> tuple[Path, list[str], str]:
    """A trained run, its words, and what is told of its tokenizer."""
    folder = tmp_path_factory.mktemp("lossy")
    file, lost = folder / "tokenizer.json", "e\u0301" if request.param == "probe" else "\u2581"
    if request.param == "probe":
        spec = json.loads((workshop / "runs" / "demo" / "tokenizer.json").read_text())
        file.write_text(json.dumps(spec | {"normalizer": {"type": "NFC"}}))
        told = r"comes back as 'caf\xe9"
    else:
        metaspace(file)
        told = "its tokens stand for"
    text = folder / "text"
    text.mkdir()
    for number in range(8):
        (text / f"{number}.txt").write_text(f"caf{lost} {number} a mill\n" * 40)
    words = [
        *tiny_demo,
        f"data.sources={text}",
        f"data.tokenizer={file}",
        f"data.directory={folder / 'shards'}",
        "name=lossy",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        refused = spoken("train", *words, code=2)
        assert "loses text" in refused["error"] and SAID in refused["remedy"]
        report, error = trained(*words, SAID)
    loses = " ".join(report["tokenizer"]["loses"].split())
    assert loses in error and told in loses
    return folder, words, told


@pytest.fixture
def here(lossy: tuple[Path, list[str], str], monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(lossy[0])
    return lossy[0]


def test_every_verb_tells_what_is_lost(here: Path, lossy: tuple[Path, list[str], str]) -> None:
    report = json.loads((here / "runs/lossy/report.json").read_text())
    about = report["tokenizer"]
    evaluated = spoken("eval", "lossy")
    ingested = spoken("data", "ingest", *lossy[1], SAID)
    sampled = spoken("sample", "lossy", "--tokens", "4")
    loses = about["loses"]
    by_probe = lossy[2].startswith("comes")  # a sample reads no text
    assert bool(sampled.get("tokenizer_loses")) == by_probe
    assert sampled.get("tokenizer_loses", "") in loses
    assert lossy[2] in loses
    assert evaluated["tokenizer_loses"] == ingested["tokenizer_loses"] == loses
    raw = sum(file.stat().st_size for file in (here / "text").iterdir())
    counted = raw - 8 * 40 * (1 if "\\xe9" in loses else 2)
    assert about["lost_share"] == pytest.approx(1 - counted / raw)
    assert f" {counted:,} bytes of " in loses and f" text of {raw:,}" in loses
    assert "tokenizer loses" in (here / "runs/lossy/report.html").read_text()


def test_a_run_from_before_the_rule_opens_and_tells(
    here: Path, lossy: tuple[Path, list[str], str]
) -> None:
    """It has no data.json, its plan says nothing of losses, and its tokenizer's file is gone."""
    evaluated = spoken("eval", "lossy")
    run = here / "runs" / "older"
    shutil.copytree(here / "runs" / "lossy", run, symlinks=True)
    (run / "data.json").unlink()
    plan = (run / "plan.toml").read_text()
    assert "lossy_tokenizer = true\n" in plan
    (run / "plan.toml").write_text(plan.replace("lossy_tokenizer = true\n", ""))
    kept = (here / "tokenizer.json").rename(here / "away.json")
    shutil.rmtree(here / "shards")
    try:
        older = spoken("eval", "older")
        assert older == evaluated | {"run": "runs/older"} and older["tokenizer_loses"]
        assert spoken("sample", "older", "--tokens", "4")["text"]
        exported = spoken("export", "older", "--to", "hf", "--output", str(here / "exported"))
        by_probe = lossy[2].startswith("comes")  # an export reads no text
        assert exported.get("tokenizer_loses", "").startswith("'caf") == by_probe
        plan_file = str(run / "plan.toml")
        report, error = trained(plan_file, "--resume", "name=older", "goal.steps=7")
        assert report["steps"] == 7 and " ".join(report["tokenizer"]["loses"].split()) in error
    finally:
        kept.rename(here / "tokenizer.json")

"""Pages that rows, cards and sources say: receipts, gains by bottleneck, and messages of errors."""

import ast
import json
import re
from pathlib import Path
from typing import Any

import pytest
from sitepages.decisions import decisions_page, gains_by_bottleneck
from sitepages.errors import errors_page
from sitepages.figures import colours, figure, with_pictures
from sitepages.measured import effects, learned
from sitepages.receipt_picture import learning_picture, receipt_picture
from sitepages.receipts_pages import receipts
from sitepages.spoken import Speaker, letters

from headrace.cli.catalogue import catalogue
from headrace.core.errors import RefusalKind

RATIO = {"value": 0.5, "low": 0.4, "high": 0.8, "unit": "x"}


def _row(**more: Any) -> dict[str, Any]:
    row = {"technique": "torch_compile", "base": "recipe", "shape": "160m", "commit": "abc"}
    row |= {"hardware": "NVIDIA H200", "n": 2, "left_out": False, "knobs": "", "overrides": []}
    return row | {"metrics": {"speed_ratio": RATIO, "memory_ratio": RATIO}} | more


@pytest.fixture
def results(tmp_path: Path) -> Path:
    """Write a folder of few rows; return it."""
    rows = [
        _row(),
        _row(left_out=True),
        _row(technique="tf32", refused="no GPU | here", metrics={}),
    ]
    natural: dict[str, Any] = {
        "device": "cuda",
        "workload": "60m",
        "hardware": "NVIDIA H200",
        "verdict": "launch",
    }
    natural["measured"] = [
        {"change": ["+torch_compile"], "gain": {"low": 0.9, "value": 1.0, "high": 1.1, "n": 2}},
        {"change": ["+tf32"], "gain": None},
        {"change": ["+cpu_threads"], "gain": {"low": 0.2, "value": 0.3, "high": 0.4, "n": 2}},
    ]
    lesson = _row(technique="muon", change="left out", words=["-muon"], kind="technique", n=3)
    lesson |= {"reached": [False] * 3, "base_seconds": [1.0] * 3, "metrics": {}}
    better = lesson | {"technique": "qk_norm", "change": "added", "words": ["+qk_norm"]}
    better |= {"reached": [True] * 3, "metrics": {"ratio": {"value": 1.2, "low": 1.1, "high": 1.3}}}
    for name, some in (
        ("techniques", rows),
        ("natural", [natural]),
        ("learning", [lesson, better]),
    ):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(r) + "\n" for r in some))
    return tmp_path


def test_what_was_left_out_is_told_as_with_it_over_without(results: Path) -> None:
    added, left = effects(results)["torch_compile"]
    assert added.speed and (added.speed.low, added.speed.value, added.speed.high) == (0.4, 0.5, 0.8)
    assert left.speed and (left.speed.low, left.speed.value, left.speed.high) == (1.25, 2, 2.5)
    assert left.how == "left out of the compiled recipe" and left.where == "160m, H200"


def test_a_receipt_is_a_picture_with_its_numbers(results: Path) -> None:
    svg = receipt_picture("torch_compile", effects(results)["torch_compile"])
    assert re.findall(r">(\d\.\d\d)<", svg) == ["0.50", "2.00", "0.50", "2.00"]
    assert "added to the compiled recipe; 160m, H200" in svg
    assert ">1.20<" in learning_picture(learned(results)["qk_norm"])


def test_rows_of_other_topics_are_shown_where_a_technique_has_none(results: Path) -> None:
    side = _row(kind="side", side="fsdp", ranks=2, metrics={"ratio_to_one": RATIO})
    (results / "scaling.jsonl").write_text(json.dumps(side) + "\n")
    speed = _row(kind="speed", side="headrace_half", method="lora")
    speed["metrics"] = {f"{which}ratio_to_peft_liger_kept": RATIO for which in ("", "memory_")}
    (results / "finetune.jsonl").write_text(json.dumps(speed) + "\n")
    told = receipts(results)
    assert "2 GPUs, tokens/s of each over one GPU alone; 160m, H200" in told["fsdp"]
    assert "over PEFT with Liger&#x27;s kernels (half); 160m, H200" in told["lora"]
    assert "verdict is launch; 60m, H200" in told["cpu_threads"] and ">1.30<" in told["cpu_threads"]
    assert "verdict is launch" not in told["torch_compile"]


def test_pages_of_techniques_show_what_was_measured(results: Path) -> None:
    told = receipts(results)
    assert "<svg" in told["torch_compile"] and '??? note "All rows"' in told["torch_compile"]
    assert "0 of 3 seeds reached" in told["muon"] and "3 of 3 seeds reached" in told["muon"]
    assert "Verdict: helps" in told["muon"] and ">1.20<" in told["qk_norm"]
    assert "refused: no GPU / here" in told["tf32"] and "lora" not in told


def test_gains_stand_under_the_verdict_that_they_were_measured_under(results: Path) -> None:
    rows = [json.loads(line) for line in (results / "natural.jsonl").read_text().splitlines()]
    change, _ = gains_by_bottleneck(rows)["launch"]["a GPU"]
    assert (change.words, change.times) == ("--with torch_compile", (2.0,))
    page = decisions_page(catalogue(), results)
    _, _, launch = page.partition("### launch\n")
    assert "| `--with torch_compile` | 2.00 | 1 | 60m on H200 |" in launch.split("### ")[0]
    assert "speed 0.50 to 2.00; memory 0.50 to 2.00" in launch
    assert "--with torch_compile: 2.00 times as fast, 1 run on a GPU" in page


def test_pictures_follow_the_scheme_of_their_page(tmp_path: Path) -> None:
    svg = '<svg class="f-c0"><style>.f-c0{fill:red}</style><rect/></svg>'
    assert "<style>" not in figure(svg) and "<rect/>" in figure(svg)
    (tmp_path / "one.svg").write_text(svg)
    html = with_pictures('<p><img alt="Told" src="../pictures/one.svg" /></p>', tmp_path)
    assert "<rect/>" in html and "<figcaption>Told</figcaption>" in html
    sheet = colours()
    assert ".drawn .f-c0{fill:#" in sheet and '[data-md-color-scheme="slate"] .drawn' in sheet


SOURCE = """
LEAST = "8 GB"
AT_HAND = mend("+selective_checkpoint")
class ConfigError(HeadraceError):
    '''It is wrong.'''
    exit_code = EXIT_PLAN
class HeadraceError(Exception):
    '''It is shown.'''
    exit_code: int = EXIT_FAILED
def check(plan, path):
    near = f"model.heads={plan.heads}"
    if not path:
        raise ConfigError(f"{path} does not hold {LEAST} of {len(plan.layers)}", near)
    raise ConfigError("the memory is full: " + str(plan), AT_HAND | mend("batch.tokens=8"))
def fail(error):
    raise ConfigError(error, "")
"""


def test_messages_and_remedies_are_read_from_the_source(tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    refusals = "class RefusalKind(StrEnum):\n" + "".join(
        f"    {name.upper()} = '{name}'\n    '''about {name}'''\n" for name in map(str, RefusalKind)
    )
    (tmp_path / "data" / "one.py").write_text(SOURCE + refusals)
    page = errors_page(tmp_path)
    assert "| `ConfigError` | 2 | It is wrong. |" in page
    assert "| `memory` | about memory |" in page
    first = "| `<path> does not hold 8 GB of <layers>` | ConfigError | `model.heads=<heads>` |"
    second = "`--with selective_checkpoint or batch.tokens=8` |"
    assert first in page and second in page
    assert "2 messages, made from" in page and "1 more are passed on" in page


@pytest.mark.parametrize(
    ("source", "said"),
    [
        ("mend('+a', 'b=1')", "--with a b=1"),
        ("mend('-a').otherwise('b')", "--without a (or b)"),
        ("mend('a=1', text='a=1,') | mend('b=2')", "a=1, or b=2"),
        ("leave_out('model.dim')", "leave out model.dim"),
        ("rerun_with('--to', 'hf', verb='export')", "the same command with --to hf"),
        ("rerun_without('--to', verb='export')", "the same command without --to"),
        ("'a' if one else 'b'", "a or b"),
        ("self._any()", "<any>"),
    ],
)
def test_a_remedy_is_said_as_it_is_typed(source: str, said: str) -> None:
    speaker = Speaker(ast.parse(""))
    assert speaker.remedy(ast.parse(source, mode="eval").body, None) == said


def test_placeholders_are_no_letters_of_a_message() -> None:
    assert letters("<anything> is 8") == 2

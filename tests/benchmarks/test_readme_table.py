"""The README's numbers come from receipts, and only from them."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "readme_table.py"
sys.path.insert(0, str(PROGRAM.parent))
from readme_table import how_right, of_techniques  # noqa: E402

PAGE = "# Title\n\n<!-- results:begin -->\nold\n<!-- results:end -->\n\nrest\n"


def _row(what: str, rate: float, **facts: Any) -> dict[str, Any]:
    metrics = {
        "tokens_per_s": {"value": rate, "low": rate - 10, "high": rate + 10, "unit": "tokens/s"},
        "peak_memory": {"value": 2**31, "low": 2**31, "high": 2**31, "unit": "bytes"},
    }
    return {"peer": what, "shape": "160m", "hardware": "GPU", "commit": "abc", "n": 5,
            "metrics": metrics, **facts}  # fmt: skip


def _render(folder: Path, rows: list[dict[str, Any]], *flags: str) -> tuple[int, str]:
    readme, results = folder / "README.md", folder / "results"
    if not readme.exists():
        readme.write_text(PAGE)
    results.mkdir(exist_ok=True)
    (results / "peers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [sys.executable, str(PROGRAM), "--page", str(readme), "--results", str(results)]
    told = subprocess.run([*command, *flags], capture_output=True, text=True, check=False)
    return told.returncode, readme.read_text()


def test_the_truth_says_where_its_rows_were_measured(tmp_path: Path) -> None:
    row = {"measurement": "healthy", "workload": "a", "verdict": None, "abstained": True}
    rows = [{**row, "hardware": h} for h in ("Xeon, 2 cores", "NVIDIA H200", "Xeon, 2 cores")]
    (tmp_path / "doctor.jsonl").write_text("".join(json.dumps(r) + "\n" for r in rows))
    found = next(line for line in how_right(tmp_path).splitlines() if "blamed" in line)
    assert "| 3/100: 2 on a CPU, 1 on an NVIDIA H200 |" in found


def test_every_program_is_in_the_list_of_programs() -> None:
    told = (PROGRAM.parent / "README.md").read_text()
    missing = [p.name for p in PROGRAM.parent.glob("*.py") if f"`{p.name}`" not in told]
    topics = [p.stem for p in (PROGRAM.parents[1] / "results").glob("*.jsonl")]
    missing += [t for t in topics if f"`{t}`" not in told and f"/{t}.jsonl`" not in told]
    assert not missing


def test_the_home_page_links_to_every_page_of_the_guide() -> None:
    nav = (PROGRAM.parents[1] / "mkdocs.yml").read_text().partition("nav:")[2]
    pages = set(re.findall(r"[\w/-]+\.md", nav)) - {"index.md"}
    told = (PROGRAM.parents[1] / "docs" / "index.md").read_text()
    assert not {page for page in pages if f"({page})" not in told}


def test_the_readme_is_not_behind_the_receipts() -> None:
    told = subprocess.run([sys.executable, str(PROGRAM), "--check"], capture_output=True,
                          text=True, check=False)  # fmt: skip
    assert told.returncode == 0, told.stderr


def test_a_technique_has_its_own_rows(tmp_path: Path) -> None:
    one, other = (_row("", rate, technique=name, base="recipe") for name, rate in
                  (("muon", 1_000), ("lora", 2_000)))  # fmt: skip
    (tmp_path / "techniques.jsonl").write_text(f"{json.dumps(one)}\n{json.dumps(other)}\n")
    found = of_techniques(tmp_path)
    assert found.keys() == {"muon", "lora"}
    assert "muon added to the recipe | 160m | GPU | 5 | 1,000" in found["muon"]
    assert "2,000" not in found["muon"]


def test_without_rows_nothing_is_claimed(tmp_path: Path) -> None:
    code, page = _render(tmp_path, [])
    assert code == 0
    assert "No receipts yet" in page
    assert page.startswith("# Title\n") and page.endswith("\n\nrest\n") and "old" not in page


def test_a_row_is_shown_with_its_spread_and_units(tmp_path: Path) -> None:
    _, page = _render(tmp_path, [_row("headrace", 560_000), _row("litgpt", 510_000)])
    assert "| what | shape | hardware | n | tokens per s | peak memory, GiB | commit |" in page
    assert "| headrace | 160m | GPU | 5 | 560,000 (559,990 to 560,010) | 2 | abc |" in page
    assert "| litgpt | 160m | GPU | 5 | 510,000 (509,990 to 510,010) | 2 | abc |" in page


def test_newer_rows_replace_and_retracted_rows_go(tmp_path: Path) -> None:
    rows = [
        _row("headrace", 1_000),
        _row("headrace", 2_000),
        _row("headrace", 9_000_000),
        {"retracts": 3, "reason": "the clock was wrong"},
        _row("headrace", 5_000, kind="tune"),
    ]
    _, page = _render(tmp_path, rows)
    assert "| 2,000 (1,990 to 2,010) |" in page
    assert page.count("| headrace |") == 1


def test_fewer_readings_do_not_hide_more(tmp_path: Path) -> None:
    _, page = _render(tmp_path, [_row("headrace", 111_000), _row("headrace", 222_000, n=2)])
    assert "111,000" in page and "222,000" not in page


def test_a_refusal_says_why(tmp_path: Path) -> None:
    rows = [_row("headrace", 1_000), _row("litgpt", 0, metrics={}, refused="out of memory")]
    _, page = _render(tmp_path, rows)
    assert "| litgpt | 160m | GPU | 5 | refused: out of memory |  | abc |" in page


def test_check_fails_when_the_page_is_behind(tmp_path: Path) -> None:
    assert _render(tmp_path, [_row("headrace", 1_000)], "--check")[0] == 1
    assert _render(tmp_path, [_row("headrace", 1_000)])[0] == 0
    assert _render(tmp_path, [_row("headrace", 1_000)], "--check")[0] == 0

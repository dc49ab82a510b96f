"""Check that the numbers of the pages come from receipts, and only from them."""

import json
import re
from pathlib import Path
from typing import Any

import receipts
import torch
from kernel_gaps import Piece, best, fingerprints, parser, pieces, plan_from, work_of
from kernel_gaps import table as gap_table
from readme_table import gaps, main, of_techniques, subject, three_numbers, todays
from truth_rows import fault

from headrace.assemble.context import elsewhere, make_context

PROGRAM = Path(__file__).parents[2] / "benchmarks" / "readme_table.py"

PAGE = "# Title\n\n<!-- results:begin -->\nold\n<!-- results:end -->\n\nrest\n"


def _row(what: str, rate: float, **facts: Any) -> dict[str, Any]:
    metrics = {
        "tokens_per_s": {"value": rate, "low": rate - 10, "high": rate + 10, "unit": "tokens/s"},
        "peak_memory": {"value": 2**31, "low": 2**31, "high": 2**31, "unit": "bytes"},
    }
    return {
        "peer": what,
        "shape": "160m",
        "hardware": "GPU",
        "commit": "abc",
        "n": 5,
        "metrics": metrics,
        **facts,
    }


def _render(folder: Path, rows: list[dict[str, Any]], *flags: str) -> tuple[int, str]:
    readme, results = folder / "README.md", folder / "results"
    if not readme.exists():
        readme.write_text(PAGE)
    results.mkdir(exist_ok=True)
    (results / "peers.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    try:
        main(["--page", str(readme), "--results", str(results), *flags])
    except SystemExit as ended:
        return 1 if isinstance(ended.code, str) else int(ended.code or 0), readme.read_text()
    return 0, readme.read_text()


def test_three_numbers_have_their_receipts(tmp_path: Path) -> None:
    hosts = ("Xeon, 2 cores", "NVIDIA H200", "Xeon, 2 cores")
    faults = [fault("slow_loader", "input", hardware=host) for host in hosts]
    ratio = {"value": 1.25, "low": 1.2, "high": 1.3, "unit": "x"}
    peer = _row("headrace", 1_000)
    peer["metrics"] |= {"ratio_to_torchtitan": ratio, "memory_ratio_to_torchtitan": ratio}
    (tmp_path / "doctor.jsonl").write_text("".join(json.dumps(r) + "\n" for r in faults))
    (tmp_path / "peers.jsonl").write_text(json.dumps(peer) + "\n")
    speed, time, verdicts = three_numbers(tmp_path).splitlines()[2:]
    assert "**1.25 times**" in speed and "5 paired readings, 1.2 to 1.3: GPU, abc" in speed
    assert "not measured" in time and "**100%" in verdicts
    assert "| 3 runs: 2 on a CPU, 1 on an NVIDIA H200; `results/doctor.jsonl` |" in verdicts


def test_a_page_has_todays_words_and_the_commands_of_rows() -> None:
    stored = "trunk: matrix products, products; `kernels.py --bases trunk`"
    assert todays(stored) == "baseline: matmuls of older rows, matmuls; `kernels.py --bases trunk`"


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
    main(["--check"])


def test_a_technique_has_its_own_rows(tmp_path: Path) -> None:
    one, other = (
        _row("", rate, technique=name, base="recipe")
        for name, rate in (("muon", 1_000), ("lora", 2_000))
    )
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
        _row("headrace", 1_000, commit="old"),
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


def test_two_hosts_of_one_commit_have_a_line_each(tmp_path: Path) -> None:
    rows = [_row("headrace", 111_000, commit="old"), *(_row("headrace", r) for r in (222, 333))]
    _, page = _render(tmp_path, rows)
    assert "| 222 " in page and "| 333 " in page and "111,000" not in page
    _, page = _render(tmp_path, [_row("litgpt", 1, n=0, metrics={}, refused="no room")] * 2)
    assert page.count("| litgpt |") == 1


def test_a_refusal_says_why(tmp_path: Path) -> None:
    rows = [_row("headrace", 1_000), _row("litgpt", 0, metrics={}, refused="out of memory")]
    _, page = _render(tmp_path, rows)
    assert "| litgpt | 160m | GPU | 5 | refused: out of memory |  | abc |" in page


def test_check_fails_when_the_page_is_behind(tmp_path: Path) -> None:
    assert _render(tmp_path, [_row("headrace", 1_000)], "--check")[0] == 1
    assert _render(tmp_path, [_row("headrace", 1_000)])[0] == 0
    assert _render(tmp_path, [_row("headrace", 1_000)], "--check")[0] == 0


# --- what of a step is above the ceilings ------------------------------------------------------

SIZES = (8, 32, 8, 4096, 64)
"""Attention that core/assumed.py has a row of: 444 and 385 TFLOP/s by cuDNN."""


def _profile(step: float, families: dict[str, float], **facts: Any) -> dict[str, Any]:
    metrics = {name: {"value": ms, "unit": "ms"} for name, ms in {"step": step, **families}.items()}
    base = {"shape": "1b", "hardware": "NVIDIA H200", "commit": "abc", "n": 1, "techniques": []}
    return {**base, "command": "python kernel_table.py 1b", "metrics": metrics, **facts}


def _cells(told: str) -> dict[str, list[str]]:
    rows = [line.strip("| ").split(" | ") for line in told.splitlines() if line.startswith("| ")]
    return {row[0]: row[1:] for row in rows[1:]}


def test_a_gap_is_time_less_work_at_the_ceiling() -> None:
    forward = 2 * 8 * 32 * 4096**2 * 64
    work = [
        {"family": "products", "what": "bf16", "flops": 7.95e12},  # 10 ms
        {"family": "products", "what": "fp8", "flops": 15.17e12},  # 10 ms
        {"family": "attention", "what": "cudnn", "flops": 16 * forward, "sizes": SIZES},
        {
            "family": "attention",
            "what": "cudnn",
            "flops": 40 * forward,
            "sizes": SIZES,
            "backward": True,
        },
        {"family": "elementwise", "what": "norm", "bytes": 0.427e10},  # 1 ms
        {"family": "elementwise", "what": "streams", "bytes": 0.854e10},  # 2 ms
    ]
    families = {"products": 25.0, "attention": 100.0, "elementwise": 4.0, "copies": 0.5, "idle": 2}
    told = gap_table(_profile(130.0, families, work=json.loads(json.dumps(work))))
    mixing_ms = forward * 1e3 * (16 / 444e12 + 40 / 385e12)
    lost = {"products": 5, "attention": 100 - mixing_ms, "elementwise": 1, "copies": 0.5, "idle": 2}
    cells = _cells(told)
    assert list(cells) == sorted(lost, key=lambda name: -lost[name])
    assert {name: row[-1] for name, row in cells.items()} == {
        n: f"{v:.2f}" for n, v in lost.items()
    }
    assert cells["products"] == [
        "25.00",
        "19.0%",
        "23.12 TFLOP",
        "924.8 TFLOP/s",
        "1156 TFLOP/s",
        "80.0%",
        "5.00",
    ]
    assert cells["elementwise"][2:6] == ["12.81 GB", "3.203 TB/s", "4.27 TB/s", "75.0%"]
    assert cells["attention"][5] == f"{mixing_ms:.1f}%"
    assert cells["copies"][2:6] == cells["idle"][2:6] == ["-"] * 4
    assert "Of 131.5 ms (kernels and idle; unprofiled, a step took 130.0), " in told
    assert f"{sum(lost.values()):.1f} ms, {sum(lost.values()) / 131.5:.1%}, are above" in told


def test_a_plan_that_became_another_is_told_and_not_computed() -> None:
    row = _profile(3.0, {"products": 1.5, "idle": 0.5}, plan_sha256="0")
    gone = {**row, "command": "python benchmarks/kernels.py 9b"}
    silent = {**row, "no_work": "it does not say"}
    for one, why in ((row, "another fingerprint"), (gone, "no shape 9b"), (silent, "not say")):
        told = gap_table(one)
        assert why in told and "is not known" in told
        assert _cells(told) == {
            "products": ["1.50", "75.0%", *"-----"],
            "idle": ["0.50", "25.0%", *"-----"],
        }


def test_work_that_nothing_tells_is_left_out_of_what_is_lost() -> None:
    work = [
        {"family": "attention", "what": "flex", "flops": 1.0, "sizes": SIZES, "unknown": "why"},
        {"family": "products", "what": "bf16", "flops": 7.95e11},
    ]
    told = gap_table(_profile(3.0, {"attention": 1.0, "products": 2.0}, work=work))
    assert _cells(told)["attention"][2:] == ["-"] * 5
    assert "1.0 ms, 33.3%, are above the ceilings: products 1.0. Not told: attention: why." in told


def test_a_row_of_before_gets_its_plans_work() -> None:
    plan = plan_from(parser().parse_args(["1b", "--with", "float8_linear"]))
    now, *_, before = fingerprints(plan)
    assert now == receipts.sha256(plan.dump())
    metrics = {name: {"value": 1.0} for name in ("step", "idle", "matrix_products", "rest")}
    row = _profile(1.0, {}, plan_sha256=before, metrics=metrics)
    row["command"] = "python benchmarks/kernels.py 1b --with float8_linear --longest 16"
    found = pieces(row)
    blocks, head, tokens = 16 * 2048 * (3072 + 2048 + 3 * 8192), 128256 * 2048, 32768
    assert {p.what: p.flops for p in found if p.family == "products"} == {
        "fp8": 6 * tokens * blocks,
        "bf16": 6 * tokens * head,
    }
    scores = 16 * 2 * 8 * 32 * 4096**2 * 64
    assert sum(p.flops for p in found if p.family == "attention") == scores * 3.5
    assert {p.what: p.family for p in found}["norm"] == "other"
    context = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
    work = work_of(plan, context)
    assert {p.what: p.family for p in work}["norm"] == "elementwise"
    assert [Piece.read(json.loads(json.dumps(p.plain()))) for p in work] == work


def test_a_fingerprint_holds_only_with_what_is_new_at_its_defaults() -> None:
    changes = {
        "trace.every_steps=50": 40,
        "model.logit_cap=30": 39,
        "data.lossy_tokenizer=true": 38,
        "model.value_embeddings=1": 35,
        "model.head_init=zero": 33,
        "optimizer.lr_factors.head=2": 31,
        "optimizer.decay_factors.vectors=1": 30,
        "data.separator=END": 28,
        "data.decontamination.share=0.4": 26,
        "data.tokenizer_pattern=gpt2": 25,
        "data.special_from_text=true": 22,
        "model.window=4": 17,
    }
    for change, known in changes.items():
        plan = plan_from(parser().parse_args(["160m", "--set", change]))
        assert len(list(fingerprints(plan))) == known
        assert next(fingerprints(plan)) == receipts.sha256(plan.dump())


def test_the_fastest_row_with_idle_times_stands() -> None:
    rows = [
        _profile(5.0, {"idle": 1.0}, commit="slow"),
        _profile(3.0, {"products": 1.0}, commit="blind"),
        _profile(4.0, {"idle": 1.0}, commit="fast"),
        _profile(4.5, {"idle": 1.0}, commit="new"),
        _profile(6.0, {"idle": 1.0}, commit="fp8", techniques=["float8_linear"]),
    ]
    assert [row["commit"] for row in best(rows)] == ["fast", "fp8"]
    known = _profile(7.0, {"idle": 1.0}, commit="known", work=[{"family": "products", "flops": 1}])
    assert [row["commit"] for row in best([*rows, known])] == ["known", "fp8"]


def test_every_published_gap_has_a_name() -> None:
    """Check that no table of gaps on the page calls the cause of a gap unknown."""
    published = gaps(PROGRAM.parents[1] / "results")
    assert published.count("are above the ceilings: ") == 3 and "is not known" not in published


def test_without_profiles_no_gap_is_claimed(tmp_path: Path) -> None:
    assert "No receipts yet" in gaps(tmp_path)


def test_a_base_is_named_with_what_the_technique_changes_of_it() -> None:
    row = {
        "technique": "dynamic_batch",
        "base": "recipe",
        "knobs": "batch.micro_sequences=0",
        "overrides": ["data.sources=DIR", "batch.micro_sequences=1", "-bf16_parameters"],
    }
    changes = "(-bf16_parameters batch.micro_sequences=1)"
    assert subject(row) == (
        f"dynamic_batch (batch.micro_sequences=0) added to the recipe {changes}"
    )
    assert subject(row | {"knobs": ""}).endswith(f"the recipe {changes}")


def test_what_a_shape_has_or_nothing_reads_is_no_change() -> None:
    scope = "techniques.torch_compile.scope=block"
    row = {"technique": "muon", "base": "trunk", "overrides": [scope, "optimizer.clip_norm=1.0"]}
    assert subject(row | {"shape": "1b"}) == "muon added to the trunk"
    on = row | {"techniques": ["torch_compile"]}
    assert subject(on | {"shape": "1b"}) == "muon added to the trunk"  # its plan says so
    assert subject(on | {"shape": "160m"}) == f"muon added to the trunk ({scope})"


def test_an_ablation_of_part_of_a_recipe_says_so() -> None:
    """Check that a changed recipe is named with its changes where a technique is left out."""
    whole = {"bf16_parameters", "cudnn_attention", "fused_cross_entropy", "torch_compile"}
    row = {"technique": "fused_swiglu", "base": "recipe", "left_out": True, "shape": "160m"}
    assert subject(row | {"techniques": [*whole]}) == "fused_swiglu left out of the recipe"
    part = subject(row | {"techniques": [*whole - {"torch_compile"}, "muon"]})
    assert part == "fused_swiglu left out of the recipe (+muon -torch_compile)"


def test_rows_of_another_batch_hide_none_of_the_shapes_own(tmp_path: Path) -> None:
    own = _row("", 1_000, technique="muon", base="trunk")
    small = _row("", 2_000, technique="muon", base="trunk", overrides=["batch.micro_sequences=2"])
    (tmp_path / "techniques.jsonl").write_text(f"{json.dumps(own)}\n{json.dumps(small)}\n")
    found = of_techniques(tmp_path)["muon"]
    assert "| muon added to the baseline | 160m | GPU | 5 | 1,000" in found
    assert (
        "| muon added to the baseline (batch.micro_sequences=2) | 160m | GPU | 5 | 2,000" in found
    )


def test_what_was_not_read_hides_nothing(tmp_path: Path) -> None:
    known = _row("", 1_000, technique="muon", base="trunk")
    late = {
        **_row("", 1, technique="muon", base="trunk"),
        "n": 0,
        "metrics": {},
        "refused": "no time left",
        "commit": "later",
    }
    (tmp_path / "techniques.jsonl").write_text(f"{json.dumps(known)}\n{json.dumps(late)}\n")
    found = of_techniques(tmp_path)["muon"]
    assert "1,000" in found and "no time left" not in found
    (tmp_path / "techniques.jsonl").write_text(f"{json.dumps(late)}\n")
    assert "no time left" in of_techniques(tmp_path)["muon"]


def test_each_side_of_a_comparison_has_its_line(tmp_path: Path) -> None:
    hand, one = (_row("", rate, side=side) for rate, side in ((900, "at hand"), (200, "one")))
    for row in (hand, one):
        del row["peer"]
    _, page = _render(tmp_path, [hand, one])
    assert "| at hand |" in page and "| one |" in page

"""The page about one run: everything is told, nothing is invented, nothing is fetched."""

import re
import time
from collections.abc import Callable
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError
from headrace.report.single import write_report

MakeRun = Callable[..., Path]
NULLS: dict[str, Any] = {
    "message": None,
    "goal": {"asked": {"bits_per_byte": 2.2, "minutes": None}, "reached": None},
    "steps": None,
    "tokens": None,
    "wall_s": None,
    "steady_tokens_per_s": None,
    "model_flops_utilization": {"value": None},
    "peak_memory_bytes": {"allocated": None, "reserved": None, "predicted": None},
    "memory_lines": None,
    "memory_measured": None,
    "phase_s": {"input": None, "forward": None},
    "wasted_token_fraction": None,
    "input_wait": {"p50_s": None},
    "val": [{"step": 0, "tokens": 0, "wall_s": 0, "loss_nats": None, "bits_per_byte": None}],
    "dollars": None,
    "restarts": None,
    "skipped_steps": None,
    "techniques": {"muon": {"active": None, "numbers": {"matrices": None}}},
    "stream_sha256": None,
    "seed": None,
    "parameters": None,
    "narrowest": None,
    "sample": None,
    "command": None,
    "tokenizer": None,
}


class Outline(HTMLParser):
    """Collect a page's headings, tags and visible text, and check that its tags are balanced."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.headings: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.words: list[str] = []
        self.open: list[str] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag != "meta":
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if "style" not in self.open:
            self.words.append(data)
        if self.open and self.open[-1] in ("h1", "h2"):
            self.headings.append(data)

    @property
    def text(self) -> str:
        return re.sub(r"\s+", " ", " ".join(self.words))


def read_page(run: Path) -> tuple[str, Outline]:
    """Write the page and parse it."""
    html = write_report(run).read_text()
    return html, Outline(html)


def test_sections_stand_in_the_order_of_a_readers_questions(make_run: MakeRun) -> None:
    html, outline = read_page(make_run())
    assert outline.headings == [
        "demo",
        "Key figures",
        "Bottleneck: computation",
        "Loss",
        "Where the time went",
        "Memory at the peak",
        "Wasted tokens",
        "Techniques",
        "A sample of its text",
        "Environment",
        "Repeat this run",
    ]
    assert outline.open == []
    assert html.startswith("<!doctype html>")
    assert len(html) < 600_000


def test_every_key_figure_is_shown(make_run: MakeRun) -> None:
    _, outline = read_page(make_run())
    for told in (
        "Reached 2.2 bits per byte at step 250 after 2 min 13 s and 2.05M tokens.",
        "The whole run took 3 min 40 s and 3.28M tokens, for $0.031.",
        "1.974",  # validation
        "15,754",  # tokens per second
        "41.2 %",  # utilization
        "of 121 GFLOP/s",
        "402.0 MiB",
        "391.0 MiB predicted, by tracker",
        "The prediction was 2.7 % too low.",
        "1.2 %",  # wasted
        "56.6 %",  # backward
        "Matrix products of the backward pass keep both cores busy.",
        "57.4 % of the step.",
        "25 matrices are updated by orthogonalised momentum",
        "in force",
        "documents per row 2.7",
        "Xeon 8488C",
        "9c56cc51b374c3ba189210d5b6d4bf57790d351c96c47c02190ecf1e430635ab",
        "headrace train runs/demo/plan.toml",
        "[techniques.document_packing]",
    ):
        assert told in outline.text, told


def test_nothing_is_fetched_and_nothing_runs(make_run: MakeRun) -> None:
    html, outline = read_page(make_run())
    assert "default-src 'none'" in html
    assert not re.search(r"https?:|//[a-z]|@import|url\((?!#)", html)
    for tag, attributes in outline.tags:
        assert tag not in ("script", "link", "img", "iframe", "object", "image")
        assert not any(name.startswith("on") for name in attributes)
        assert (attributes.get("href") or "#").startswith("#")


def test_charts_are_described_and_take_the_pages_colours(make_run: MakeRun) -> None:
    html, outline = read_page(make_run())
    drawings = [attributes for tag, attributes in outline.tags if tag == "svg"]
    assert len(drawings) == 2
    for attributes in drawings:
        label = attributes["aria-label"] or ""
        assert "from 6.100 to 1.974" in label and "goal is 2.2" in label
        assert attributes["role"] == "img" and "width" not in attributes
    svg = html[html.index("<svg") : html.rindex("</svg>")]
    assert "stroke: var(--c0)" in svg and "stroke: var(--goal)" in svg
    assert not re.search(r"#ab[0-9a-f]{2}cd|DejaVu|font:", svg) and "font-size: 11px" in svg
    ids = [attributes["id"] for _, attributes in outline.tags if "id" in attributes]
    assert ids and len(ids) == len(set(ids))


def test_both_colour_schemes_define_every_colour_that_is_used(make_run: MakeRun) -> None:
    html, _ = read_page(make_run())
    light, dark = re.findall(r":root\{([^}]*)\}", html)
    assert "prefers-color-scheme:dark" in html
    used = set(re.findall(r"var\((--[a-z0-9-]+)\)", html)) - {"--at"}
    for scheme in (light, dark):
        assert used <= set(re.findall(r"(--[a-z0-9-]+):", scheme))


@pytest.mark.parametrize("scheme", [0, 1])
def test_contrast_is_enough_to_read(make_run: MakeRun, scheme: int) -> None:
    html, _ = read_page(make_run())
    colours = dict(
        re.findall(r"--([a-z0-9-]+):(#[0-9a-f]+)", re.findall(r":root\{([^}]*)\}", html)[scheme])
    )

    def luminance(name: str) -> float:
        code = colours[name].removeprefix("#")
        code = code if len(code) == 6 else "".join(2 * c for c in code)
        parts = [int(code[i : i + 2], 16) / 255 for i in (0, 2, 4)]
        r, g, b = (p / 12.92 if p <= 0.04045 else ((p + 0.055) / 1.055) ** 2.4 for p in parts)
        return 0.2126 * r + 0.7152 * g + 0.0722 * b

    def contrast(one: str, other: str) -> float:
        high, low = sorted((luminance(one), luminance(other)), reverse=True)
        return (high + 0.05) / (low + 0.05)

    for words in ("ink", "soft"):
        assert min(contrast(words, ground) for ground in ("card", "page")) >= 4.5
    for badge in ("good", "bad", "plain"):
        assert contrast(badge, f"{badge}-bg") >= 4.5
    for data in range(8):
        assert contrast(f"c{data}", "card") >= 3.0


def test_what_was_not_measured_is_said_and_never_zero(make_run: MakeRun) -> None:
    html, outline = read_page(make_run(rows=[], environment={"commit": None}, plan="", **NULLS))
    assert not re.search(r"\b(None|nan|NaN|inf|null)\b", outline.text)
    assert "$" not in outline.text and "Cost" not in outline.text
    for told in (
        "Whether it reached 2.2 bits per byte was not measured",
        "The loss was not measured: no step was recorded.",
        "Phases were not measured.",
        "Wasted tokens were not measured.",
        "The bottleneck was not measured.",
        "No sample was written.",
        "not checked",
        "no evidence was recorded",
        "No command was recorded.",
        "The folder holds no plan.toml.",
    ):
        assert told in outline.text, told
    figures = html[html.index("<dl") : html.index("</dl>")]
    values = re.findall(r"<dd(?: class=\"absent\")?>([^<]*)</dd>", figures)
    assert values == ["not measured"] * 8


def test_a_run_that_was_not_priced_speaks_of_no_money(make_run: MakeRun) -> None:
    _, outline = read_page(make_run(dollars=None))
    assert "$" not in outline.text and "Cost" not in outline.text


def test_user_text_cannot_become_markup(make_run: MakeRun) -> None:
    evil = "<script>alert('x')</script>\"><img src=x onerror=y> $\\frac{$"
    run = make_run(
        name=evil,
        status="failed",
        message=evil,
        narrowest={"station": evil, "share": 0.1, "sentence": evil, "evidence": evil},
        sample={"prompt": evil, "text": evil},
        command=evil,
        techniques={evil: {"active": False, "detail": evil, "numbers": {evil: 1}, "line": evil}},
        memory_lines=[{"name": evil, "bytes": 10}],
        memory_measured={evil: 12},
        stream_sha256=evil,
        tokenizer={evil: evil},
        environment={evil: {evil: evil}},
        plan=f"# {evil}\n",
    )
    html, outline = read_page(run)
    assert not {"script", "img"} & {tag for tag, _ in outline.tags}
    assert not any("onerror" in attributes for _, attributes in outline.tags)
    assert unescape(html).count("<script>alert") >= 14


def test_half_a_character_in_a_sample_is_no_obstacle(make_run: MakeRun) -> None:
    _, outline = read_page(make_run(sample={"prompt": "a", "text": "b\ud83d c"}))
    assert "b? c" in outline.text


def test_the_page_is_the_same_every_time(make_run: MakeRun) -> None:
    run = make_run()
    first = write_report(run).read_bytes()
    time.sleep(0.01)
    assert write_report(run).read_bytes() == first


def test_the_first_steps_do_not_flatten_the_chart(make_run: MakeRun) -> None:
    _, outline = read_page(make_run())
    assert "up to 6.10, lie" in outline.text


def test_a_run_without_validation_is_drawn_in_nats(make_run: MakeRun) -> None:
    html, outline = read_page(make_run(val=[]))
    assert "nats per token" in outline.text and "var(--goal)" in html
    assert "Training loss" in outline.text and "validation was not measured" in outline.text


def test_one_evaluation_and_no_recorded_step_still_make_a_page(make_run: MakeRun) -> None:
    row = {"step": 0, "tokens": 0, "wall_s": 2.0, "loss_nats": 8.3, "bits_per_byte": 3.7}
    _, outline = read_page(make_run(rows=[], val=[row]))
    assert "3.700" in outline.text


@pytest.mark.slow
def test_a_hundred_thousand_rows_make_a_small_page(make_run: MakeRun) -> None:
    from_rows = [
        {"step": n, "tokens": n * 8192, "wall_s": n * 0.1, "loss": 3.0, "step_s": 0.1}
        for n in range(1, 100_001)
    ]
    assert write_report(make_run(rows=from_rows)).stat().st_size < 200_000


def test_a_folder_that_cannot_be_written_is_told(make_run: MakeRun) -> None:
    run = make_run()
    (run / "report.html").mkdir()
    with pytest.raises(ConfigError, match=r"report\.html is a folder") as caught:
        write_report(run)
    assert caught.value.remedy.text == f"--output {run / 'report.html' / 'comparison.html'}"

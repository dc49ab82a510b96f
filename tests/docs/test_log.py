"""Check that LOG.md is a list of experiments with verdicts, and that its index is complete."""

from log_index import anchor, index, main, problems

LOG = """# Log

<!-- index:begin -->
<!-- index:end -->

### kept: a `knob` of 2, measured (2026-11, CPU)

One line.

### Lost: no verdict

1
2
3
4
5
6
"""


def test_the_log_is_well_formed_and_its_index_is_whole() -> None:
    main(["--check"])


def test_an_entry_has_a_verdict_a_date_and_five_lines() -> None:
    heading, lines = problems(LOG)
    assert "kept|lost|open" in heading and "6 lines" in lines


def test_the_index_links_to_each_heading() -> None:
    link = anchor("### kept: a `knob` of 2, measured (2026-11, CPU)")
    assert link == "kept-a-knob-of-2-measured-2026-11-cpu"
    assert f"- 2026-11: [a `knob` of 2, measured](#{link})" in index(LOG)

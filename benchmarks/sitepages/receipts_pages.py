"""Add to a technique's page what was measured of it, as pictures and as tables."""

from collections.abc import Mapping
from pathlib import Path

from readme_table import of_techniques

from sitepages.figures import figure
from sitepages.measured import effects, effects_elsewhere, learned, refusals
from sitepages.receipt_picture import learning_picture, receipt_picture

CAPTION = (
    "A ratio is that of the plan with it over the plan without it, or over what the line names. "
    "Green is better, red is worse, grey is within 1%."
)
NOTHING = (
    "No row measures this technique alone yet, so nothing is claimed of its speed. What its card "
    "says is derived, or is what its source reports."
)
"""What a page says where there is no row."""


def receipts(results: Path) -> Mapping[str, str]:
    """Return the receipt of every technique that has one, as Markdown, by its name.

    Args:
        results: the folder of rows.
    """
    pictures: dict[str, list[str]] = {}
    for name, measured in (effects_elsewhere(results) | effects(results)).items():
        pictures.setdefault(name, []).append(figure(receipt_picture(name, measured), CAPTION))
    for name, gain in learned(results).items():
        if gain.refused:
            words = f"It cannot stand in the recipe that was measured: {gain.refused}"
            pictures.setdefault(name, []).append(words)
            continue
        verdict = (
            f"Verdict: {gain.verdict}. [What buys quality per second](../../learning-rows.md) has "
            "the recipe, its target and all others."
        )
        pictures.setdefault(name, []).extend([figure(learning_picture(gain)), verdict])
    refused = refusals(results)
    tables = of_techniques(results)
    texts: dict[str, str] = {}
    for name in {**pictures, **refused, **tables}:
        parts = list(pictures.get(name, []))
        if table := tables.get(name):
            parts.append(f'??? note "All rows"\n\n{_indented(table)}')
        texts[name] = "\n\n".join(parts)
    return texts


def _indented(text: str) -> str:
    return "\n".join(f"    {line}" if line else "" for line in text.splitlines())

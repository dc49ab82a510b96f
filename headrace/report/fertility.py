"""Render how tokenizers compare on texts as a page: bars of tokens per character, and the cost."""

from collections.abc import Mapping, Sequence
from itertools import cycle

from headrace.core.units import format_bytes, format_count
from headrace.data.fertility import TextGroup
from headrace.predict.text_cost import TextCost
from headrace.report.page import Safe, bar, join, legend, muted, page, section, swatch, table
from headrace.report.style import DATA_COLOURS
from headrace.report.words import dollars

HEAD = ("text", "tokenizer", "tokens / word", "tokens / character", "tokens / byte")
COST_HEAD = (
    *("tokenizer", "vocabulary", "tokens", "steps", "context in words", "context in bytes"),
    *("cost", "hours", "price"),
)


def rows_of(groups: Sequence[TextGroup]) -> list[list[str]]:
    """Return a row of each text and tokenizer, in the order of HEAD."""
    return [
        [
            group.name,
            name,
            _rate((rates := group.rates(name))["tokens_per_word"]),
            _rate(rates["tokens_per_character"]),
            _rate(rates["tokens_per_byte"]),
        ]
        for group in groups
        for name in group.tokens
    ]


def cost_rows(costs: Sequence[TextCost]) -> list[list[str]]:
    """Return a row of each tokenizer, in the order of COST_HEAD."""
    return [
        [
            cost.tokenizer,
            f"{cost.vocab:,}",
            format_count(cost.tokens),
            f"{cost.steps:,}",
            "-" if cost.context_words is None else f"{cost.context_words:,.0f}",
            f"{cost.context_bytes:,.0f}",
            f"{cost.relative_cost:.2f}x",
            "-" if cost.hours is None else f"{cost.hours:.3g}",
            "-" if cost.dollars is None else dollars(cost.dollars),
        ]
        for cost in costs
    ]


def fertility_page(
    groups: Sequence[TextGroup],
    costs: Sequence[TextCost],
    *,
    plan: str = "",
    notes: Mapping[str, str] | None = None,
) -> str:
    """Return the page of a comparison.

    Args:
        groups: the texts, with every tokenizer's tokens.
        costs: what each tokenizer costs a plan; empty without one.
        plan: the plan's name.
        notes: what each tokenizer loses of a text, by name.
    """
    names = [*groups[0].tokens] if groups else []
    colours = dict(zip(names, cycle(DATA_COLOURS), strict=False))
    marks = legend((swatch(colours[name]), name) for name in names)
    body = [
        section(
            "Tokens per character",
            marks,
            _bars(groups, colours),
            muted("A longer bar is a longer sequence for the same text."),
        )
    ]
    if costs:
        body.append(
            section(
                f"What it means for {plan}",
                table("Cost by tokenizer", COST_HEAD, cost_rows(costs)),
                muted(
                    "One pass over this text. The cost counts the model's FLOPs, the output matrix "
                    "of each vocabulary included, in times the least."
                ),
            )
        )
    body.append(section("Every number", table("Tokens by text", HEAD, rows_of(groups), text=2)))
    body += [muted(f"{name} loses text: {loses}") for name, loses in (notes or {}).items()]
    cut = [group.name for group in groups if not group.is_whole]
    if cut:
        body.append(muted(f"Only the beginning was read of: {', '.join(cut)}."))
    head = Safe("<header><h1>Tokenizers compared</h1></header>")
    return page("Tokenizers compared", head, *body, source="the texts")


def _bars(groups: Sequence[TextGroup], colours: Mapping[str, str]) -> Safe:
    """Render a row for each text, with one bar for each tokenizer."""
    rates = {
        (group.name, name): group.rates(name)["tokens_per_character"] or 0.0
        for group in groups
        for name in colours
    }
    widest = max(rates.values(), default=1.0) or 1.0
    rows = [
        (
            group.name,
            join(bar(rates[group.name, n] / widest, c) for n, c in colours.items()),
            " / ".join(f"{rates[group.name, name]:.2f}" for name in colours),
            format_bytes(group.text_bytes),
        )
        for group in groups
    ]
    head = ("text", "by tokenizer", "tokens per character", "size")
    return table("Tokens per character", head, rows, text=2)


def _rate(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"

"""This module holds the verb `data pack`: what each way of making rows does to a plan's text."""

from typing import TYPE_CHECKING, Any

from headrace.cli.arguments import Json, Overrides, PlanName
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.loading import loading
from headrace.core.units import format_count

if TYPE_CHECKING:
    from headrace.data.packing.ledger import PackingLedger
    from headrace.plan.plan import Plan


def pack(plan: PlanName = "demo", overrides: Overrides = None, *, json: Json = False) -> None:
    """Count padding, cropped tokens, split documents and attention by each packing policy."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.data.ingest import prepare
            from headrace.data.packing.ledger import packing_ledger
            from headrace.train.interrupts import Preparing
        progress = make_progress(json)
        try:
            with Preparing():
                wanted = named_plan(plan, overrides, verb="data pack")
                prepared = prepare(wanted, progress=progress.task)
                ledger = packing_ledger(prepared.train, wanted.data.sequence_length)
        finally:
            progress.close()
        command = _command(wanted, ledger)
        if json:
            show_json({**ledger.to_dict(*_sizes(wanted)), "command": command})
        else:
            _show(ledger, *_sizes(wanted))
            print(_sentence(ledger))
            print(command)


def _sizes(plan: "Plan") -> tuple[int, int]:
    """Return the layers of a plan's model, and the features of all its heads."""
    model = plan.model
    return model.layers, model.heads * model.resolved_head_dim


def _command(plan: "Plan", ledger: "PackingLedger") -> str:
    """Return the command that trains this plan by the policy to take."""
    from headrace.core.command import rerun_plan

    best, _ = ledger.choose()
    makers = ledger.makers()
    words = [f"--without {name}" for name in makers if name in plan.techniques and name != best]
    if best in makers and best not in plan.techniques:
        words.append(f"--with {best}")
    return rerun_plan("train", *words)


def _show(ledger: "PackingLedger", layers: int, width: int) -> None:
    """Print what the text is, the lengths of its documents, and what each policy makes of it."""
    print(
        f"{ledger.documents:,} documents of {ledger.tokens:,} tokens, the longest "
        f"{ledger.longest:,}; {ledger.longer_than_row:,} are longer than a row of "
        f"{ledger.sequence_length:,}"
    )
    lengths = [
        [f"{below // 2:,} to {below - 1:,}", f"{documents:,}", f"{tokens / ledger.tokens:.1%}"]
        for below, documents, tokens in ledger.histogram
    ]
    show_table(["tokens", "documents", "of the tokens"], lengths)
    head = [
        "policy",
        "rows",
        "padding",
        "cropped tokens",
        "split documents",
        "needlessly",
        "dropped tokens",
        "attention FLOPs",
    ]
    show_table(head, [_line(ledger, *one, layers, width) for one in ledger.policies.items()])


def _line(ledger: "PackingLedger", policy: Any, count: Any, layers: int, width: int) -> list[str]:
    return [
        str(policy),
        f"{count.rows:,}",
        f"{ledger.padding_fraction(policy):.2%}",
        f"{count.cropped_tokens / max(1, ledger.tokens):.2%}",
        f"{count.split_documents:,}",
        f"{count.needless_splits:,}",
        f"{count.dropped_tokens:,}",
        format_count(ledger.attention_flops(policy, layers, width)),
    ]


def _sentence(ledger: "PackingLedger") -> str:
    """Return in one sentence which policy to take, and why."""
    from headrace.data.packing.ledger import Choice, Policy

    best, why = ledger.choose()
    needless = ledger.needlessly_cropped(Policy.CUT)
    padding = ledger.padding_fraction(Policy.BEST_FIT_PACKING)
    reasons = {
        Choice.WHOLE_DOCUMENTS: f"a cut stream takes the beginning of their document from "
        f"{needless:.1%} of the tokens needlessly, and {padding:.2%} of padding keeps it",
        Choice.TOO_MUCH_PADDING: f"best-fit rows would be {padding:.1%} padding: there are too few "
        "short documents to fill them",
        Choice.NOTHING_TO_SEPARATE: f"a cut stream takes the beginning of their document from "
        f"{needless:.1%} of the tokens needlessly, which is too little to pay for",
    }
    return f"{best} wins: {reasons[why]}."

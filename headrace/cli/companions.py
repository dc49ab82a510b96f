"""Say where a run's chat template is not the one beside its tokenizer."""

from pathlib import Path

from headrace.cli.terminal import note
from headrace.data.chat.encode import template_line
from headrace.data.chat.record import ChatRecord
from headrace.plan.plan import Plan


def note_template(run: Path, plan: Plan) -> ChatRecord | None:
    """Return the record of a run's conversations, and note another template beside its tokenizer.

    Args:
        run: its folder.
        plan: its plan.
    """
    record = ChatRecord.load(run)
    if record is not None and (line := template_line(record, plan.data.tokenizer)):
        note(line)
    return record

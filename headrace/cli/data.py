"""This module holds the verbs under `headrace data`, of which `ingest` is the only one."""

import typer

from headrace.cli.arguments import Json, Overrides, PlanName
from headrace.cli.terminal import exit_codes, make_progress, show_json, show_table
from headrace.core.loading import loading

data = typer.Typer(no_args_is_help=True)


@data.command()
def ingest(plan: PlanName = "demo", overrides: Overrides = None, *, json: Json = False) -> None:
    """Prepare the tokenizer and the shards of a plan's data, without training."""
    with exit_codes(json):
        with loading():
            from headrace.cli.plans import named_plan
            from headrace.data.ingest import prepare
            from headrace.train.interrupts import Preparing
        progress = make_progress(json)
        try:
            with Preparing():
                wanted = named_plan(plan, overrides, verb="data ingest")
                prepared = prepare(wanted, progress=progress.task)
                sides = prepared.sides(wanted.data.validation)
                doubts = sides.doubts(wanted.data.sequence_length)
                for document in prepared.left_out:
                    progress.note(document.line())
                if prepared.tokenizer.note:
                    progress.note(prepared.tokenizer.note)
                for doubt in doubts:
                    progress.note(doubt.line)
        finally:
            progress.close()
        value = prepared.to_dict(wanted.data.validation)
        if json:
            left_out = [document.to_dict() for document in prepared.left_out]
            doubtful = [doubt.to_dict() for doubt in doubts]
            show_json(value | {"left_out": left_out, "doubts": doubtful})
        else:
            rows = {key: val for key, val in value.items() if val is not None}
            if both := rows.get("overlap"):
                rows["overlap"] = f"{both['documents']} of {both['of_documents']} documents"
            show_table(["what", "value"], [[key, str(val)] for key, val in rows.items()])

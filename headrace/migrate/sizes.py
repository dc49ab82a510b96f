"""Set the batch and the length of a fine-tuning, which trainers of models count in rows."""

from headrace.migrate.draft import Draft

PASSES_MINUTES = 600
PASSES_STEPS = 300
"""What the recipe `finetune` has before `headrace finetune` counts the text's tokens."""


def set_rows(draft: Draft, micro_key: str, rows_key: str, rows: int, length: int) -> None:
    """Set the tokens of a step, and the rows of a forward pass.

    Args:
        draft: the plan in the making.
        micro_key: the trainer's key of rows of one forward pass.
        rows_key: the trainer's key that decides the rows of a step.
        rows: of a step, over all ranks.
        length: tokens of a row.
    """
    micro = max(1, draft.whole(micro_key, 1))
    draft.carry(micro_key, draft.put("batch.micro_sequences", micro))
    draft.carry(rows_key, draft.put("batch.tokens", rows * length))


def set_passes(draft: Draft, key: str) -> None:
    """Note a number of passes over the text, which no plan holds, and set what bounds a run.

    Args:
        draft: the plan in the making.
        key: the trainer's key of the number.
    """
    count = draft.number(key, 1)
    draft.leave(
        key,
        "a plan counts steps or tokens, and passes depend on the text: headrace finetune MODEL "
        f"DATA --recipe PLAN.toml --epochs {count:g} counts them",
    )
    why = f"bounds the run until --epochs {count:g} or goal.steps=N says its length"
    draft.need("goal.minutes", PASSES_MINUTES, why)
    draft.need("schedule.steps", PASSES_STEPS, why)

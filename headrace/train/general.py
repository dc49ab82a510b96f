"""Measure what training takes away: the loss on a general text, at the beginning and at the end.

A model that learns a file of examples may forget the rest (catastrophic forgetting: McCloskey and
Cohen 1989; of large models arXiv 2405.09673). Validation cannot show it, for its text is of the
same kind. `eval.general` names a text of another kind, all of which is held out: the run's own
tokenizer reads it, and the loss is that of `evaluate` on at most `eval.tokens` tokens of it.
"""

from copy import copy
from dataclasses import replace
from typing import Any

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.progress import Progress
from headrace.data.ingest import prepare
from headrace.data.prepared import Prepared
from headrace.parallel.first import by_first
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train.evaluate import Validation


def prepare_general(plan: Plan, prepared: Prepared, world: World, progress: Progress) -> Prepared:
    """Return the run's data with the general text, where the plan names one.

    The first rank prepares it, and all ranks call this. What is prepared already is opened.

    Args:
        plan: the run's.
        prepared: the run's data, whose tokenizer reads the text.
        world: the ranks.
        progress: shows the progress.

    Raises:
        ConfigError: `eval.general` cannot be read.
    """
    if not plan.eval.general:
        return prepared
    whole, read = _plan_of(plan, prepared), list[Prepared]()

    def opened() -> bool:
        try:
            read.append(prepare(whole, progress=progress.task))
        except ConfigError as error:
            raise ConfigError(
                f"eval.general cannot be read: {error.message}", "eval.general=PATH of another text"
            ) from None
        return True

    by_first(world, opened)
    if not read:  # another rank has prepared it
        opened()
    return replace(prepared, general=read[0].validation)


def general_text(build: Build) -> Build | None:
    """Return the run with the general text in the place of its validation text, or None.

    What techniques measure of the validation text, as of preference pairs, is not measured of it.
    """
    if (general := build.prepared.general) is None:
        return None
    other = copy(build)
    other.prepared = replace(build.prepared, validation=general, chat=None)
    other.evaluates = []
    return other


def read_general(text: Build, score: Validation) -> dict[str, Any]:
    """Return what the report says of a general text before the first step.

    Args:
        text: what `general_text` returned.
        score: its evaluation.
    """
    return {
        "source": text.plan.eval.general,
        "sha256": text.prepared.validation.fingerprint,
        "tokens": score.tokens,
        "before_nats": score.loss_nats,
        "after_nats": None,
    }


def compared(
    before: dict[str, Any] | None, now: dict[str, Any] | None, progress: Progress
) -> dict[str, Any] | None:
    """Return what the report says at the end; what cannot be compared is told.

    Args:
        before: what `read_general` returned before the first step, maybe in another process.
        now: what it returns at the end.
        progress: takes a line for the reader.
    """
    if now is None:
        return before
    if before is None or before["sha256"] != now["sha256"] or before["tokens"] != now["tokens"]:
        had = "no text" if before is None else "another text"
        progress.note(f"eval.general was {had} before the first step: nothing is compared")
        return before
    progress.log(f"general text: loss {before['before_nats']:.3f} -> {now['before_nats']:.3f}")
    return {**before, "after_nats": now["before_nats"]}


def _plan_of(plan: Plan, prepared: Prepared) -> Plan:
    """Return a plan whose validation text is the general text, read by the run's tokenizer."""
    data, general = plan.data, plan.eval.general
    return Plan.model_validate(
        {
            "goal": {"steps": 1},
            "data": {
                "sources": general,
                "validation": general,
                "decontamination": None,  # it is the evaluation text
                "text_key": data.text_key,
                "tokenizer": str(prepared.directory / "tokenizer.json"),
                "lossy_tokenizer": data.lossy_tokenizer,
                "directory": data.directory,
            },
        }
    )

"""This module holds the work of `eval --tasks`."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import make_progress, show_json, show_table
from headrace.core.command import rerun_without
from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.loading import loading
from headrace.train.interrupts import Preparing

if TYPE_CHECKING:
    from headrace.inference.tasks import Score


def evaluate_tasks(
    run: Path,
    names: Sequence[str],
    *,
    delimiter: str,
    limit: int | None,
    checkpoint: str | None,
    adapter: str,
    as_json: bool,
) -> None:
    """Score a run on sets of questions, and print a table or JSON.

    Args:
        run: its folder or its name, or a quantized model.
        names: files of questions, folders of them, or tasks of lm-evaluation-harness by name.
        delimiter: what stands between a prompt and an answer of a file.
        limit: the most questions of a task, from the first on; None for all.
        checkpoint: "step-N", "latest" or "best"; None for the best, or else the latest.
        adapter: that stands on the run's base; "" for the run as it was trained.
        as_json: print one JSON value.

    Raises:
        ConfigError: there is no such run or task, or a file is no set of questions.
        RunError: the checkpoint is damaged, or computes no numbers.
        UnsupportedError: a name is no file, and lm-evaluation-harness is not installed.
    """
    with loading():
        from headrace.cli.companions import note_template
        from headrace.export.opened import open_any
        from headrace.inference.harness import run_harness
        from headrace.inference.tasks import read_task, score_tasks, task_files
    here = [name for name in names if Path(name).exists() or Path(name).suffix]
    theirs = [name for name in names if name not in here]
    tasks = [read_task(file, delimiter, limit) for file in task_files(map(Path, here))]
    names_here = [task.name for task in tasks]
    if twice := [name for name in names_here if names_here.count(name) > 1]:
        raise ConfigError(
            f"two files of --tasks have the name {twice[0]}, by which scores are told",
            rerun_without("--tasks", verb="eval") + f" --tasks {shell(Path(here[0]))}",
        )
    opened = open_any(run, catalogue(), adapter=adapter, checkpoint=checkpoint)
    build, folder = opened.build, opened.run
    note_template(opened.talks, build.plan)
    progress = make_progress(as_json)
    try:
        with Preparing():
            scores = opened.compute(
                lambda: [
                    *(score_tasks(build, tasks, progress.task) if tasks else ()),
                    *(run_harness(build, theirs, limit, progress.task) if theirs else ()),
                ]
            )
    finally:
        progress.close()
    if as_json:
        show_json({"run": str(folder), "tasks": [score.to_dict() for score in scores]})
    else:
        _show(scores, f"longer than the run's rows of {build.plan.data.sequence_length} tokens")


def _show(scores: "Sequence[Score]", rows_are: str) -> None:
    """Print a line for each measure, and what was cut or left out since it is `rows_are`."""
    rows = [
        [
            score.name,
            score.form,
            str(score.questions),
            name,
            f"{value:.4f}",
            f"{score.errors[name]:.4f}" if name in score.errors else "",
            f"{score.chance:.4f}" if score.chance and name.startswith("acc") else "",
        ]
        for score in scores
        for name, value in score.values.items()
    ]
    show_table(["task", "form", "questions", "measure", "value", "error", "chance"], rows)
    for score in scores:
        if score.shortened:
            print(f"{score.name}: {score.shortened} prompts lost their beginning, being {rows_are}")
        if score.left_out:
            print(f"{score.name}: {score.left_out} questions left out: an answer is {rows_are}")

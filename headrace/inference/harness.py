"""Let lm-evaluation-harness score a run: its tasks by name, on our model.

Only what asks for likelihoods is answered (multiple choice, cloze, perplexity of texts); a task
that samples text is refused by name. The document token stands before each prompt, as in training.
Tasks fetch their data from the network unless they are cached.

Source: github.com/EleutherAI/lm-evaluation-harness.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.progress import OnProgress
from headrace.inference.continuations import Continuation, sum_losses
from headrace.inference.tasks import Score, encode_pairs


def run_harness(
    build: Build, names: Sequence[str], limit: int | None, progress: OnProgress
) -> list[Score]:
    """Return what a run has in tasks of lm-evaluation-harness.

    Args:
        build: a run that `open_model` opened.
        names: of its tasks or groups.
        limit: the most questions of a task; None for all.
        progress: as `sum_losses` takes it.

    Raises:
        UnsupportedError: it is not installed.
        ConfigError: it has no such task, or cannot read one here.
    """
    try:
        import lm_eval  # pyright: ignore[reportMissingImports]
        from lm_eval.tasks import TaskManager  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise UnsupportedError(
            f"--tasks {names[0]} is no file, and its name is one of lm-evaluation-harness, which "
            "is not installed",
            "pip install 'headrace[eval]', or --tasks FILE.jsonl",
        ) from None
    manager = TaskManager()
    if unknown := [name for name in names if name not in manager.all_tasks]:
        raise ConfigError(
            f"--tasks {unknown[0]}: there is no such file, and lm-evaluation-harness "
            f"{lm_eval.__version__} has no task of that name",
            "--tasks FILE.jsonl",
        )
    try:
        output = lm_eval.simple_evaluate(
            model=_model(build, progress),
            tasks=[*names],
            limit=limit,
            task_manager=manager,
            bootstrap_iters=1000,
            log_samples=False,
            verbosity="ERROR",
        )
    except (OSError, ValueError, NotImplementedError) as error:
        raise ConfigError(
            f"lm-evaluation-harness cannot run {', '.join(names)} here: {error}",
            "--tasks FILE.jsonl",
        ) from None
    assert output is not None, "this process is the only one"
    return [_score(name, values, output["n-samples"]) for name, values in output["results"].items()]


def _score(name: str, values: dict[str, Any], questions: dict[str, Any]) -> Score:
    """Return the numbers of one task; the harness writes them as "measure,filter"."""
    numbers = {
        key.split(",")[0]: float(value)
        for key, value in values.items()
        if "," in key and isinstance(value, float | int)
    }
    errors = {key.removesuffix("_stderr"): numbers.pop(key) for key in [*numbers] if "_std" in key}
    asked = questions.get(name, {}).get("effective", 0)
    return Score(name, "lm-evaluation-harness", asked, numbers, errors)


def _model(build: Build, progress: OnProgress) -> Any:
    """Return our model as the harness calls one."""
    from lm_eval.api.instance import Instance  # pyright: ignore[reportMissingImports]
    from lm_eval.api.model import LM  # pyright: ignore[reportMissingImports]

    most = build.plan.data.sequence_length + 1
    tokenizer = build.prepared.tokenizer

    class Ours(LM):
        """Answer the harness with the likelihoods of a run."""

        def loglikelihood(self, requests: list[Instance]) -> list[tuple[float, bool]]:
            made = encode_pairs(tokenizer, [request.args for request in requests])
            continuations = [
                Continuation(kept, max(1, len(kept) - count), number)
                for number, (ids, count) in enumerate(made)
                for kept in [ids[-most:]]
            ]
            sums = sum_losses(build, continuations, len(continuations), progress)
            return [(-n, not missed) for n, missed in zip(sums.nats, sums.missed, strict=True)]

        def loglikelihood_rolling(self, requests: list[Instance]) -> list[float]:
            first = np.array([tokenizer.document_token], dtype=np.int64)
            continuations = []
            for number, request in enumerate(requests):
                ids = np.concatenate((first, tokenizer.encode_batch([request.args[0]])[0]))
                continuations += [
                    Continuation(ids[at : at + most], 1, number)
                    for at in range(0, len(ids) - 1, most - 1)
                ]
            return [
                -nats for nats in sum_losses(build, continuations, len(requests), progress).nats
            ]

        def generate_until(self, requests: list[Instance]) -> list[str]:
            raise NotImplementedError("it samples text, and only likelihoods are answered here")

    return Ours()

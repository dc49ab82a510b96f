"""Run an exported file by the runtime that it is for, and compare it with the model of its run.

The end of a file's name says its runtime. What a runtime computes is read from the runtime itself:
tokens, their speed, and the log-probability of every token after every prefix, which are the logits
less their logarithmic sum.
"""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, Protocol

import torch

from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.export.edge_runtime import RUNTIMES as EDGE
from headrace.export.gguf import Origin
from headrace.export.llama_cpp import Continued, LlamaCpp
from headrace.inference.load import open_model
from headrace.model.mask import Rows
from headrace.plan.technique import Catalogue
from headrace.train.checkpoint import Saved

COMPARED = 64
"""Most prefixes whose log-probabilities are compared: the last ones. A runtime sends those of a
vocabulary of 50,000 as some 5 MB of text."""


class Runtime(Protocol):
    """A runtime has opened one file."""

    name: str
    """its name and version"""
    origin: Origin | None
    """the run that the file says it was made of; None where it says none"""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the token that begins it; none is special by its name."""
        ...

    def continue_(self, ids: Sequence[int], tokens: int) -> Continued:
        """Continue `ids` by at most so many of the likeliest tokens."""
        ...

    def log_probabilities(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the log-probability in nats of each token that may follow `ids`, by id."""
        ...


RUNTIMES: dict[str, Callable[[Path, str, int], Runtime]] = {".gguf": LlamaCpp, **EDGE}
"""What opens a file, by the end of its name: from the file, the prompt, and the tokens to add."""


def open_runtime(file: Path, prompt: str, tokens: int) -> Runtime:
    """Open an exported file for one prompt.

    Args:
        file: the file.
        prompt: the text to continue.
        tokens: the most tokens to add.

    Raises:
        ConfigError: there is no such file, it is damaged, or it has no room for so many tokens.
        UnsupportedError: nothing here runs it, or its runtime is not installed.
    """
    if not file.is_file():
        raise ConfigError(f"{file} is no file", "headrace export RUN --to gguf, which writes one")
    if file.suffix not in RUNTIMES:
        known = ", ".join(RUNTIMES)
        raise UnsupportedError(
            f"{file} ends in {file.suffix or 'nothing'}, and the files that run here in {known}",
            "headrace export RUN --to gguf, which writes one",
        )
    return RUNTIMES[file.suffix](file, prompt, tokens)


class Distance(NamedTuple):
    """Say how far what a file computes is from its run's model."""

    largest_nats: float
    """the largest difference of a log-probability"""
    prefixes: int
    """after how many prefixes all tokens were compared"""
    same_choice: float
    """the share of these whose likeliest token is the same"""


def run_beside(file: Path, origin: Origin | None) -> Path | None:
    """Return the run in whose folder a file lies, where it has the weights that the file is of."""
    if origin is None:
        return None
    for folder in (*file.parents, *file.resolve().parents):
        saved = folder / "checkpoints" / f"step-{origin.step}"
        if (folder / "plan.toml").is_file() and saved.is_dir():
            try:
                values = Saved(saved, verify=False).values
            except (RunError, ConfigError):
                return None
            return folder if values["seal"] == origin.seal else None
    return None


@torch.no_grad()
def distance(runtime: Runtime, ids: Sequence[int], run: Path, catalogue: Catalogue) -> Distance:
    """Return how far a runtime's log-probabilities are from those of its run's model.

    Args:
        runtime: has opened the file.
        ids: a text; each of its last prefixes is compared.
        run: from `run_beside`.
        catalogue: the techniques and model families.
    """
    assert runtime.origin is not None
    build = open_model(run, catalogue, checkpoint=f"step-{runtime.origin.step}")
    ids_BT = torch.tensor([[*ids]], device=build.device)
    rows = Rows(torch.arange(len(ids), device=build.device)[None])
    entries = build.prepared.tokenizer.vocab
    with build.autocast():
        logits_TV = build.model.logits(ids_BT, rows)[0, :, :entries]
    ours_TV = logits_TV.float().log_softmax(-1).cpu()
    pairs = list(_pairs(runtime, ids, ours_TV))
    same = sum(max(theirs, key=theirs.__getitem__) == int(ours.argmax()) for ours, theirs in pairs)
    largest = max(
        (ours[list(theirs)] - torch.tensor([*theirs.values()])).abs().max().item()
        for ours, theirs in pairs
    )
    return Distance(largest, len(pairs), same / len(pairs))


def _pairs(
    runtime: Runtime, ids: Sequence[int], ours_TV: torch.Tensor
) -> Iterator[tuple[torch.Tensor, dict[int, float]]]:
    """Yield our log-probabilities and the runtime's after each of the last prefixes."""
    for end in range(max(0, len(ids) - COMPARED), len(ids)):
        yield ours_TV[end], runtime.log_probabilities(ids[: end + 1])

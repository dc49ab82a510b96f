"""Define `data.mixture`: how much of each source the run reads, and when.

Weights say which share of the sequences each source has. A stage has weights of its own and ends at
a share of the horizon or at a count of tokens, so that the last part of a run may read other text
than the first. A limit says how many tokens of a source are read at most, or how many epochs; what
it would have had beyond that goes to the other sources by their weights. Without weights a source
counts by its tokens, and a temperature T makes that tokens^(1/T), which evens small sources up
(multilingual BERT and XLM-R: arXiv 1911.02116, section 3.1).
"""

from collections.abc import Iterator, Sequence
from typing import Annotated, Any

from pydantic import Field

from headrace.core.limits import MOST
from headrace.core.remedy import Remedy, leave_out, mend
from headrace.core.strict import Strict, Wrong

Weight = Annotated[float, Field(ge=0, le=1e12)]
Temperature = Annotated[float, Field(gt=0, le=1e6)]
Epochs = Annotated[float, Field(ge=0, le=1e6)]


class MixtureStage(Strict):
    """Say what is read in one part of the run."""

    until: float | None = Field(default=None, gt=0, le=10**18)
    """Where the stage ends: at most 1 is a share of the horizon, above it a number of tokens from
    the run's beginning. The last stage has none."""
    weights: tuple[Weight, ...] | None = None
    """One share per source, 0 for what is not read; without it those of `data.mixture`."""
    temperature: Temperature | None = None
    """Temperature that is given in place of weights: a source counts by its
    tokens^(1/temperature)."""


class MixtureConfig(Strict):
    """Say how much of each source is read, and when."""

    weights: tuple[Weight, ...] | None = None
    """One share per source, of all stages that have none of their own."""
    temperature: Temperature | None = None
    """Temperature that is given in place of weights: a source counts by its
    tokens^(1/temperature). At 1, which is in force where neither is given, each counts by its size;
    a higher one makes the sources more even."""
    stages: tuple[MixtureStage, ...] = ()
    """Parts of the run with weights of their own, in order."""
    max_tokens: tuple[Annotated[int, Field(ge=0, le=MOST)], ...] | None = None
    """The most tokens that each source gives to the run; 0 is no limit. It is kept to the whole
    sequences that it holds."""
    max_epochs: Epochs | tuple[Epochs, ...] | None = None
    """The most times that a source is read through: one number for all, or one per source; 0 is no
    limit."""

    def resolved_stages(self) -> tuple[MixtureStage, ...]:
        """Return the stages with the weights that are in force in them; one where none is given."""
        own = {"weights": self.weights, "temperature": self.temperature}
        return tuple(
            stage if _says(stage) else stage.model_copy(update=own)
            for stage in self.stages or (MixtureStage(),)
        )

    @property
    def has_shares(self) -> bool:
        """Return whether a stage ends at a share of the horizon."""
        return any(stage.until is not None and stage.until <= 1 for stage in self.stages)

    def epochs_of(self, source: int) -> float:
        """Return the most epochs of a source; 0 is no limit."""
        if isinstance(self.max_epochs, tuple):
            return self.max_epochs[source]
        return self.max_epochs or 0.0


def _says(table: MixtureConfig | MixtureStage) -> bool:
    """Return whether a table has weights or a temperature."""
    return table.weights is not None or table.temperature is not None


def check_mixture(
    mixture: MixtureConfig | None,
    sources: Sequence[str],
    weights: Sequence[float] | None,
    horizon_steps: int | None,
) -> None:
    """Refuse a mixture that contradicts itself, the sources or the horizon.

    Args:
        mixture: `data.mixture`.
        sources: `data.sources`.
        weights: `data.weights`.
        horizon_steps: where the schedule ends; None where the plan does not say.

    Raises:
        Wrong: it does; with the first reason and what mends it.
    """
    if mixture is not None:
        for message, remedy in _contradictions(mixture, sources, weights, horizon_steps):
            raise Wrong(message, remedy)


def _contradictions(
    mixture: MixtureConfig,
    sources: Sequence[str],
    weights: Sequence[float] | None,
    horizon_steps: int | None,
) -> Iterator[tuple[str, Remedy]]:
    """Yield what is wrong with a mixture, each with what mends it."""
    count = len(sources)
    if weights is not None:
        yield (
            "data.weights and data.mixture both say how sources are mixed; say it in data.mixture",
            leave_out("data.weights"),
        )
    tables: list[tuple[str, MixtureConfig | MixtureStage]] = [("data.mixture", mixture)]
    tables += [(f"data.mixture.stages.{n}", stage) for n, stage in enumerate(mixture.stages)]
    for key, table in tables:
        if table.weights is not None and table.temperature is not None:
            yield f"{key} has weights and a temperature; give one", leave_out(f"{key}.temperature")
        yield from _per_source(f"{key}.weights", table.weights, 1, sources)
        if table.weights is not None and not any(table.weights):
            yield (
                f"{key}.weights are all 0: nothing is read",
                _listed(f"{key}.weights", [1] * count),
            )
    yield from _per_source("data.mixture.max_tokens", mixture.max_tokens, 0, sources)
    if isinstance(mixture.max_epochs, tuple):
        yield from _per_source("data.mixture.max_epochs", mixture.max_epochs, 0, sources)
    stages = mixture.resolved_stages()
    for source, name in enumerate(sources):
        if all(stage.weights and not stage.weights[source] for stage in stages):
            yield (
                f"data.mixture reads nothing of {name}: its weight is 0 in every stage",
                Remedy(text="leave it out of data.sources and out of the weights"),
            )
    yield from _ends(mixture, horizon_steps)


def _per_source(
    key: str, values: Sequence[Any] | None, filler: int, sources: Sequence[str]
) -> Iterator[tuple[str, Remedy]]:
    """Yield an error where a list has not one number per source."""
    if values is not None and len(values) != len(sources):
        near = [*values, *[filler] * len(sources)][: len(sources)]
        yield (
            f"{key} has {len(values)} numbers for {len(sources)} data.sources; give one per source",
            _listed(key, near),
        )


def _listed(key: str, values: Sequence[Any]) -> Remedy:
    """Return the remedy that sets a list; within a stage, which no override reaches, as text."""
    written = f"{key}={[*values]}".replace(" ", "")
    return Remedy(text=written) if ".stages." in key else mend(written)


def _ends(mixture: MixtureConfig, horizon_steps: int | None) -> Iterator[tuple[str, Remedy]]:
    """Yield what is wrong with the ends of the stages."""
    ends = [stage.until for stage in mixture.stages]
    for number, end in enumerate(ends[:-1]):
        if end is None:
            yield (
                f"data.mixture.stages.{number} does not say where it ends, and another follows",
                Remedy(text=f"until=0.5 in data.mixture.stages.{number}"),
            )
    if ends and ends[-1] is not None:
        yield (
            f"the last of data.mixture.stages ends at until = {ends[-1]:g}, and nothing says what "
            "is read after it",
            Remedy(text="leave out the until of the last stage, or add a stage after it"),
        )
    asked = [end for end in ends if end is not None]
    if any(end <= 1 for end in asked) and any(end > 1 for end in asked):
        yield (
            "data.mixture.stages end at shares of the horizon and at counts of tokens; give one "
            f"kind (until = {', '.join(f'{end:g}' for end in asked)}; at most 1 is a share)",
            Remedy(text="until of every stage as a share, or of every stage in tokens"),
        )
    if sorted(set(asked)) != asked:
        yield (
            "data.mixture.stages must end one after the other (until = "
            f"{', '.join(f'{end:g}' for end in asked)})",
            Remedy(text="until of every stage larger than of the one before it"),
        )
    if mixture.has_shares and horizon_steps is None:
        yield (
            "data.mixture.stages end at shares of a horizon that the plan does not say",
            mend("schedule.steps=1000"),
        )

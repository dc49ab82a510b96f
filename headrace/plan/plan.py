"""Define the plan: the frozen, complete description of a run, as TOML and as Python tables.

Later layers win: defaults < family < recipe or file < `key=value` overrides < --with / --without.
`Plan.read` reads a plan's text, and `Plan(...)` takes the same tables from Python. Either way every
mistake becomes one ConfigError here and nowhere else.
"""

import json
import tomllib
from collections.abc import Iterable, Mapping
from functools import partial
from math import lcm
from typing import Any, Literal

import tomli_w
from pydantic import (
    Field,
    ModelWrapValidatorHandler,
    SerializeAsAny,
    ValidationError,
    ValidationInfo,
    model_validator,
)

from headrace.core.errors import ConfigError
from headrace.core.files import check_values, toml_values
from headrace.core.layers import left_to_techniques, left_to_weights
from headrace.core.limits import LARGEST_BATCH, MOST
from headrace.core.model_config import ModelConfig
from headrace.core.overrides import known_of, settle, write_override
from headrace.core.remedy import leave_out, mend
from headrace.core.strict import READ, Strict, Wrong, explained, read_table
from headrace.core.units import largest_divisor
from headrace.core.vision_config import VisionConfig
from headrace.plan.batches import BatchStages
from headrace.plan.data_config import DataConfig
from headrace.plan.hardware_config import HardwareConfig
from headrace.plan.mesh_config import MeshConfig
from headrace.plan.mixture import check_mixture
from headrace.plan.optimizer_config import OptimizerConfig
from headrace.plan.schedule import ENDLESS, ScheduleConfig
from headrace.plan.technique import Catalogue, Technique, installed
from headrace.plan.vision import check_vision

ATTENDS = "parts.attend"
"""The socket whose owner computes attention."""


class Goal(Strict):
    """Say what the run is for. The first limit that is reached ends it; a target ends it sooner."""

    bits_per_byte: float | None = Field(default=None, gt=0, le=64)
    """Validation loss to reach, in bits per byte of text."""
    steps: int | None = Field(default=None, ge=1, le=MOST)
    """Largest number of optimizer steps."""
    tokens: int | None = Field(default=None, ge=1, le=MOST)
    """Largest number of tokens, padding included."""
    minutes: float | None = Field(default=None, gt=0, le=1e9)
    """Largest number of minutes on the clock, evaluation and compiling included."""
    dollars: float | None = Field(default=None, gt=0, le=1e12)
    """Most dollars that the run may cost, by hardware.dollars_per_hour."""


class Batch(Strict):
    """Say how much is read per step."""

    tokens: int = Field(default=8192, ge=2, le=LARGEST_BATCH)
    """Tokens per optimizer step over all ranks."""
    micro_sequences: int = Field(default=0, ge=0, le=LARGEST_BATCH)
    """Sequences per forward pass on one rank; 0 takes all of a rank's sequences at once."""


class EvalConfig(Strict):
    """Validate on held-out documents, always on the same sequences."""

    every_steps: int = Field(default=50, ge=1, le=MOST)
    """Steps between evaluations."""
    tokens: int = Field(default=131_072, ge=1, le=MOST)
    """Largest number of validation tokens of each evaluation while training, in sequences spread
    evenly over the text; all of the set when it is smaller. `headrace eval` reads all."""
    before: bool = False
    """Evaluate before the first step too, so that the report says what a fine-tuning gained."""
    general: str = ""
    """A text of another kind, as a source of `data.sources`: its loss before the first step and at
    the end says what was forgotten. All of it is held out."""


class CheckpointConfig(Strict):
    """Save without stopping: copy to the host, write aside, and rename when complete."""

    every_steps: int = Field(default=100, ge=0, le=MOST)
    """Steps between checkpoints; 0 saves nothing, not even in the end."""
    keep_last: int = Field(default=2, ge=1, le=MOST)
    """Number of newest checkpoints that are kept."""
    keep_best: bool = True
    """Also keep the checkpoint of the lowest validation loss."""
    memory_every_steps: int = Field(default=0, ge=0, le=MOST)
    """Steps between two copies of the state in the memory of the hosts, which a resume reads where
    they are newer than the disk's; 0 makes none."""


class TraceConfig(Strict):
    """Record profiler windows: a few steps under torch.profiler, written beside the run.

    None are recorded by default. A window needs `steps` + 2 steps that no evaluation and no
    checkpoint interrupts.
    """

    every_steps: int = Field(default=0, ge=0, le=MOST)
    """Steps from one profiler window to the next, the first one soon after the start; 0 records
    none."""
    steps: int = Field(default=3, ge=2, le=8)
    """Steps that a profiler window measures."""


class TrackConfig(Strict):
    """Choose loggers beside metrics.jsonl. All are off by default and need `headrace[track]`."""

    to: tuple[Literal["tensorboard", "wandb", "mlflow"], ...] = ()
    """Which loggers get every row."""


class Plan(Strict):
    """A plan describes a run. Its keys are stable: other tools and recipes rely on them."""

    name: str = Field(default="run", pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$", max_length=200)
    """The run's folder under `directory`."""
    directory: str = "runs"
    """Where runs are kept; a run's folder is `directory`/`name`."""
    seed: int = Field(default=0, ge=0, lt=1 << 63)
    """Seed of the weights and of the order of sequences."""
    device: Literal["auto", "cpu", "cuda", "mps"] = "auto"
    """auto takes a GPU when there is one."""
    guard: bool = True
    """Compare the first step with the plain trainer's, and stop if it computes something else."""
    attention: Literal["plan", "measured"] = "plan"
    """Backend of attention: `plan` takes what the techniques say, `measured` the exact one that is
    fastest at the run's shapes."""
    model: ModelConfig = ModelConfig()
    vision: VisionConfig | None = None
    """Tell images apart by this network, and read no text; `model` then says `precision` alone."""
    data: DataConfig = DataConfig()
    goal: Goal = Goal()
    batch: Batch = Batch()
    optimizer: OptimizerConfig = OptimizerConfig()
    schedule: ScheduleConfig = ScheduleConfig()
    eval: EvalConfig = EvalConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    mesh: MeshConfig = MeshConfig()
    hardware: HardwareConfig = HardwareConfig()
    track: TrackConfig = TrackConfig()
    trace: TraceConfig = TraceConfig()
    techniques: dict[str, SerializeAsAny[Technique]] = Field(default_factory=dict)
    """One table per technique that is on, as in `[techniques.muon]`; its keys are its knobs."""

    @property
    def rows_per_step(self) -> int:
        """Return the number of sequences in one optimizer step, over all ranks."""
        return self.batch.tokens // self.data.sequence_length

    @property
    def batches(self) -> BatchStages:
        """Return the tokens of each step, over all ranks: batch.tokens, or less while it grows."""
        grown = (technique.batch_stages(self) for technique in self.techniques.values())
        return BatchStages(tuple(next(filter(None, grown), [(0, self.batch.tokens)])))

    @property
    def micro_rows(self) -> int:
        """Return the number of sequences of one forward pass on one rank."""
        return self.batch.micro_sequences or self.rows_per_step // self.mesh.data

    @property
    def learns_from_nothing(self) -> bool:
        """Return whether all weights are learned, and none is given."""
        frozen = any("frozen" in technique.composes for technique in self.techniques.values())
        return not (frozen or self.model.pretrained)

    @property
    def table_techniques(self) -> list[str]:
        """Return the names of techniques that give a model tables beside its embedding."""
        tables = {"config.bigram_multiple", "config.value_embeddings"}
        return [n for n, one in self.techniques.items() if not tables.isdisjoint(one.claims)]

    @property
    def lengthening(self) -> list[Technique[Any]]:
        """Return the techniques by which a row's length changes from step to step.

        What cuts rows alike in every step, as length_mixing, is not among them.
        """
        varies = {"recut", "values"}
        return [one for one in self.techniques.values() if varies <= {*one.composes}]

    @property
    def micro_group(self) -> int:
        """Return the number whose multiples the micro-batches of each step must be on a rank."""
        return lcm(*(technique.micro_group(self) for technique in self.techniques.values()))

    @property
    def horizon_steps(self) -> int | None:
        """Return the step at which the schedule ends, or None when nothing in the plan says."""
        return self.schedule.steps or self.goal_steps

    @property
    def goal_steps(self) -> int | None:
        """Return the last step by the goal's steps and tokens; None where neither ends the run."""
        by_tokens = self.batches.steps_to(self.goal.tokens) if self.goal.tokens else None
        return min((n for n in (self.goal.steps, by_tokens) if n), default=None)

    @model_validator(mode="after")
    def _check(self) -> "Plan":
        check_vision(self)
        length, ranks = self.data.sequence_length, self.mesh.data
        unit = length * ranks
        if self.batch.tokens % unit:
            near = max(1, round(self.batch.tokens / unit)) * unit
            raise Wrong(
                f"batch.tokens = {self.batch.tokens} is not a multiple of data.sequence_length x "
                f"mesh.data = {length} x {ranks} tokens; the nearest is batch.tokens={near}",
                mend(f"batch.tokens={near}"),
            )
        per_rank = self.rows_per_step // ranks
        if per_rank % self.micro_rows:
            fit = largest_divisor(per_rank, self.micro_rows)
            raise Wrong(
                f"batch.micro_sequences = {self.micro_rows} does not divide the {per_rank} rows "
                f"of a rank; the nearest is batch.micro_sequences={fit}",
                mend(f"batch.micro_sequences={fit}"),
            )
        weights, sources = self.data.weights, self.source_list
        if weights and len(weights) != len(sources):
            raise Wrong(
                f"data.weights has {len(weights)} numbers for {len(sources)} data.sources; "
                f"give one per source",
                mend(f"data.weights={[1] * len(sources)}".replace(" ", "")),
            )
        check_mixture(self.data.mixture, sources, weights, self.horizon_steps)
        if not any(self.goal.model_dump().values()):
            raise Wrong(
                "the plan has no goal; give one, for example goal.steps=1000 "
                "or goal.bits_per_byte=1.5 with goal.minutes=60",
                mend("goal.steps=1000"),
            )
        if self.goal.dollars and not self.hardware.dollars_per_hour:
            raise Wrong(
                "goal.dollars needs the price of an hour of the run, hardware.dollars_per_hour",
                mend("hardware.dollars_per_hour=2"),
            )
        if self.schedule.kind not in ENDLESS and self.horizon_steps is None:
            raise Wrong(
                f"schedule.kind = {self.schedule.kind!r} must know where it ends; "
                "give schedule.steps=N, goal.steps=N or goal.tokens=N, or schedule.kind=constant",
                mend("schedule.steps=1000") | mend("schedule.kind=constant"),
            )
        self._check_techniques()
        return self

    def _check_techniques(self) -> None:
        """Refuse techniques that do not fit the keys beside them, and a warmup beyond the schedule.

        Raises:
            Wrong: one of them does not fit; with what mends it.
        """
        owners = [n for n, t in self.techniques.items() if ATTENDS in (*t.claims, *t.composes)]
        if self.attention == "measured" and owners:
            raise Wrong(
                f"attention = 'measured' chooses what computes attention, and {owners[0]} does so "
                f"already; give attention=plan, or --without {owners[0]}",
                mend("attention=plan") | mend(f"-{owners[0]}"),
            )
        taken = {axis for technique in self.techniques.values() for axis in technique.axes}
        for axis in ("tensor", "context", "pipeline", "expert"):
            size = getattr(self.mesh, axis)
            if size > 1 and axis not in taken:
                raise Wrong(
                    f"mesh.{axis} = {size}, and no technique of the plan splits the model along "
                    f"it; add one, as in --with {axis}_parallel, or mesh.{axis}=1",
                    mend(f"+{axis}_parallel") | mend(f"mesh.{axis}=1"),
                )
        slicing = any("shard" in technique.composes for technique in self.techniques.values())
        if self.mesh.replicate > 1 and not slicing:
            raise Wrong(
                f"mesh.replicate = {self.mesh.replicate} groups would each hold slices of the "
                "model, and no technique of the plan slices it; add one, as in --with fsdp, or "
                "mesh.replicate=1",
                mend("mesh.replicate=1") | mend("+fsdp"),
            )
        if self.model.tied_embeddings:
            self.optimizer.check_tied()
        horizon = self.horizon_steps
        if horizon is not None and self.schedule.warmup_steps > horizon:
            raise Wrong(
                f"schedule.warmup_steps = {self.schedule.warmup_steps} is past the schedule's end "
                f"at step {horizon}; the nearest is schedule.warmup_steps={horizon}",
                mend(f"schedule.warmup_steps={horizon}"),
            )

    @model_validator(mode="wrap")  # behind `_check`, whose errors it explains too
    @classmethod
    def _as_read(
        cls, given: Any, check: ModelWrapValidatorHandler["Plan"], info: ValidationInfo
    ) -> "Plan":
        """Check a plan that is made in Python like one that is read from TOML.

        Raises:
            ConfigError: as `Plan.read` raises it for the same tables.
        """
        if info.context is READ or not isinstance(given, Mapping):
            return check(given)
        values = dict(given)
        check_values(values)
        if isinstance(values.get("techniques"), Mapping):
            values["techniques"] = {
                name: _technique(name, knobs) for name, knobs in values["techniques"].items()
            }
        if isinstance(values.get("model"), Mapping) and "family" in values["model"]:
            values["model"] = installed().with_family(values["model"])
        try:
            return check(values)
        except ValidationError as error:
            raise explained(cls, error) from None

    @property
    def source_list(self) -> tuple[str, ...]:
        """Return the sources, always as a tuple."""
        sources = self.data.sources
        return (sources,) if isinstance(sources, str) else sources

    @staticmethod
    def read(
        text: str,
        catalogue: Catalogue,
        *,
        overrides: Iterable[str] = (),
        with_: Iterable[str] = (),
        without: Iterable[str] = (),
    ) -> "Plan":
        """Parse TOML and the command line's changes into a checked plan.

        Args:
            text: the recipe's TOML.
            catalogue: the techniques and model families that exist.
            overrides: `key.path=value` strings; values are TOML, bare words are strings.
            with_: names of techniques to add with their defaults.
            without: names of techniques to remove.

        Raises:
            ConfigError: a wrong key, type, range or combination, with the nearest right one.
        """
        words, with_, without = [*overrides], [*with_], [*without]
        try:
            return Plan._read(text, catalogue, words, with_, without)
        except ConfigError as error:
            read = partial(Plan._read, text, catalogue, with_=with_, without=without)
            kept = known_of(words, Plan)
            raise settle(error, lambda more: read([*kept, *more])) from None

    @staticmethod
    def _read(
        text: str, catalogue: Catalogue, overrides: list[str], with_: list[str], without: list[str]
    ) -> "Plan":
        """Read the plan once, as `read` does."""
        try:
            values = toml_values(text, "the plan")
        except tomllib.TOMLDecodeError as error:
            message = f"the plan is not valid TOML: {error}"
            raise ConfigError(message, "mend what stands there, or leave that line out") from None
        for item in overrides:
            write_override(values, item, Plan)
        made = left_to_techniques(
            values, overrides, without, lambda: Plan._read(text, catalogue, [], [], []).made()
        )
        for key in (*left_to_weights(values, overrides), *made):
            table, _, leaf = key.partition(".")
            values[table].pop(leaf, None)
        check_values(values)
        tables = values.setdefault("techniques", {})
        if not isinstance(tables, dict):
            raise ConfigError(
                "techniques must be tables",
                "headrace list, whose names are tables as in [techniques.muon]",
            )
        if both := sorted({*with_} & {*without}):
            raise ConfigError(
                f"{both[0]} is asked for and left out",
                mend(f"+{both[0]}", text=f"--with {both[0]} alone"),
            )
        for name in with_:
            catalogue.find(name, "--with")
            tables.setdefault(name, {})
        for name in without:
            catalogue.find(name, "--without")
            tables.pop(name, None)
        values["techniques"] = {
            name: read_table(catalogue.find(name), knobs, f"techniques.{name}")
            for name, knobs in tables.items()
        }
        typed = {item.partition("=")[0].strip() for item in overrides}
        given = dict(values)
        if isinstance(values.get("model", {}), dict):
            values["model"] = catalogue.with_family(values.get("model", {}))
        return read_table(Plan, values).with_keys(given, with_, typed)

    def made(self) -> dict[str, Mapping[str, Any]]:
        """Return technique -> the keys that it rewrites, with their new values."""
        return {name: technique.keys(self) for name, technique in self.techniques.items()}

    def undoing(self, *words: str) -> tuple[str, ...]:
        """Return `key=value` words behind a `-technique` for each that rewrites one of the keys.

        A run's own plan holds the keys that its techniques wrote, so either alone changes nothing.
        """
        keys = {word.partition("=")[0] for word in words}
        return (*(f"-{name}" for name, made in self.made().items() if keys & {*made}), *words)

    def with_keys(
        self, given: Mapping[str, Any], with_: Iterable[str] = (), typed: Iterable[str] = ()
    ) -> "Plan":
        """Return the plan with the keys that its techniques rewrite.

        A technique that the command names is stronger than a key of the file. A plan that starts
        from given weights also gets their tokenizer, where it names none.

        Args:
            given: the tables as they were written, before any default.
            with_: names of techniques that the command adds.
            typed: keys that the command sets.

        Raises:
            ConfigError: a key is given and a technique sets it otherwise, or two techniques do.
        """
        plan, rewrites, changed = self, {}, {}
        for name, technique in self.techniques.items():
            for key, value in technique.keys(self).items():
                table, _, leaf = key.partition(".")
                tables = given.get(table, {})
                asked = tables.get(leaf, value) if isinstance(tables, Mapping) else value
                asked = [*asked] if isinstance(asked, tuple) else asked  # as TOML has it
                below = any(f"{word}.".startswith(f"{key}.") for word in typed)
                stronger = name in with_ and not below
                if asked not in (value, "auto") and not stronger:  # "auto" leaves the key open
                    raise ConfigError(
                        f"the plan says {key} = {asked!r}, and {name} makes it {value!r}",
                        leave_out(key).otherwise(mend(f"-{name}")),
                    )
                if rewrites.setdefault(key, (name, value))[1] != value:
                    other, other_value = rewrites[key]
                    raise ConfigError(
                        f"{other} makes {key} {other_value!r}, and {name} makes it {value!r}",
                        mend(f"-{other}") | mend(f"-{name}"),
                    )
                changed.setdefault(table, {})[leaf] = value
        if self.model.pretrained and "tokenizer" not in self.data.model_fields_set:
            changed.setdefault("data", {})["tokenizer"] = self.model.pretrained
        for table, keys in changed.items():  # together, since one may fit another alone
            whole = getattr(plan, table).model_dump(exclude_unset=True) | keys
            plan = plan.replaced(**{table: whole})
        # One technique's keys may depend on another's, as a shape does on the activation.
        return plan if plan.made() == self.made() else plan.with_keys(given, with_, typed)

    def replaced(self, **tables: Any) -> "Plan":
        """Return a checked copy with whole tables replaced; design techniques use it."""
        return read_table(Plan, {**dict(self), **tables})

    def dump(self) -> dict[str, Any]:
        """Return every key with its value, as plain data; keys without a value are left out."""
        plain = self.model_dump(mode="json", exclude_none=True)
        return json.loads(json.dumps(plain))

    def to_toml(self) -> str:
        """Return the resolved plan as TOML; reading it back gives an equal plan."""
        return tomli_w.dumps(self.dump())


def _technique(name: str, knobs: Any) -> Technique[Any]:
    """Return the technique `name` with these knobs.

    A technique that was made in Python is returned as it is.

    Raises:
        ConfigError: there is no such technique, a knob is wrong, or the technique has another name.
    """
    if not isinstance(knobs, Technique):
        return read_table(installed().find(str(name)), knobs, f"techniques.{name}")
    if knobs.name() != name:
        raise ConfigError(
            f"techniques has {knobs.name()} under the name {name!r}",
            f"Plan(techniques={{{knobs.name()!r}: ...}})",
        )
    return knobs

"""This module runs the recipes of `compress`: verbs one after another, and what each one cost.

A recipe is one path from a trained run to a file. Every hop is a verb that a user can type alone,
and after every hop the model that it made is measured: bits per byte on the run's validation text,
the largest difference of a logit to the hop before, its size, and how fast it decodes here. The
last hop writes a file, which its own runtime runs in a process of its own, so that its memory is
that of the file.
"""

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import tomli_w

from headrace.cli.called import call_verb
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, RunError, nearest
from headrace.core.files import shell, write_whole
from headrace.core.folders import is_point
from headrace.core.progress import Progress, showing
from headrace.core.units import format_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from headrace.assemble.sockets import Build
    from headrace.core.model_config import ModelConfig

GROUP = 32
"""Numbers under one scale of the 4 bits that XNNPACK multiplies; it divides all widths."""
RATE = 0.2
"""Rate of a training that goes on from weights, as a share of the run's own (as `finetune` has)."""
FORMATS = {"executorch": "model.pte", "onnx": "model.onnx"}
"""The format that a recipe ends in, and the name of its file."""
DISTILLATION, ROUNDING = "distillation", "quantization_aware_training"
END = "schedule.final_fraction"
"""The key of a rate's end, which is zero where a training rounds."""
HOPS_HEAD = ("hop", "size", "bits per byte", "logits from before", "tokens/s here", "memory")
"""What `hop_rows` holds."""
HOPS_FILE, STUDENT = "hops.json", "student.toml"
"""Files of the folder that a recipe makes: what every hop cost, and the plan of its trainings."""


@dataclass(frozen=True)
class Hop:
    """Hold what one hop made, and what was measured of it."""

    name: str
    command: str
    """What makes it alone; "" of the run that the recipe began with."""
    made: str
    bytes: int
    bits_per_byte: float
    logits_from_before: float | None
    """Largest difference of a logit to the hop before; None of the first."""
    tokens_per_s: float
    """Decoding one sequence: by torch, and of a file by its own runtime."""
    peak_bytes: int | None = None
    """Memory of running a file by its own runtime; None of what is no file, or where the system
    does not tell it."""
    seconds: float = 0.0
    """What making it took."""
    before_bits_per_byte: float | None = None
    """Loss of the hop before as it is read of a file, whose runtime leaves out entries that stand
    for no token of text; None of what is no file."""


@dataclass(frozen=True)
class Recipe:
    """Say what a recipe does: its hops in order, and the formats of its numbers and its file."""

    preset: str
    """How matrices are stored, of `compress.spec.PRESETS`."""
    to: str
    """The format of its file, of `FORMATS`."""
    prunes: bool
    rounds: bool
    """Whether the training that recovers the loss rounds as the file will."""

    def hops(self, *, has_layer_norm: bool) -> tuple[str, ...]:
        """Return the names of the hops.

        Args:
            has_layer_norm: whether the run's model has layer norms.
        """
        converts = has_layer_norm and not self.prunes
        middle = ("prune", "recover") if self.prunes else ("convert",) if converts else ()
        return ("distil", *middle, "quantize", "export")


RECIPES = {
    "edge": Recipe("8da4w", "executorch", prunes=True, rounds=True),
    "inference-speed": Recipe("int8", "onnx", prunes=False, rounds=False),
}
"""By the word that `headrace compress --recipe` takes."""
EVERY_HOP = ("distil", "prune", "convert", "recover", "quantize", "export")


def recipe_of(name: str, until: str | None) -> Recipe:
    """Return a recipe by name.

    Raises:
        ConfigError: there is none, or it has no such hop.
    """
    if name not in RECIPES:
        raise ConfigError(
            f"--recipe {name} is none; they are {', '.join(RECIPES)}",
            f"--recipe {nearest(name, RECIPES)}",
        )
    if until is not None and until not in EVERY_HOP:
        raise ConfigError(
            f"--until {until} is no hop of a recipe; they are {', '.join(EVERY_HOP)}",
            f"--until {nearest(until, EVERY_HOP)}",
        )
    return RECIPES[name]


@dataclass
class Chain:
    """Run one recipe.

    Args:
        run: the run that it begins with.
        recipe: what is done.
        out: the new folder; runs go beside the first one.
        words: `key=value`, for the trainings; those of `model` are of the student.
        by: the share of the student's weights that is pruned.
        until: the last hop; all without it.
        tokens: the most validation tokens of every measurement.
        progress: shows how far it is.
    """

    run: Path
    recipe: Recipe
    out: Path
    words: Sequence[str]
    by: float
    until: str | None
    tokens: int | None
    progress: Progress
    hops: list[Hop] = field(default_factory=list)

    def __post_init__(self) -> None:
        from headrace.export.compression import COMPARED, rows_of
        from headrace.export.opened import open_any
        from headrace.inference.load import read_plan

        plan = read_plan(self.run, catalogue())
        given = dict(word.split("=", 1) for word in self.words if "=" in word)
        self._name = given.pop("name", self.run.name)
        self._model = {k: v for k, v in given.items() if k.startswith("model.")}
        self._rest = [f"{k}={v}" for k, v in given.items() if k not in self._model]
        has_layer_norm = plan.model.norm == "layer_norm"
        self._names = self.recipe.hops(has_layer_norm=has_layer_norm)
        self._check_hop()
        self._check_runtime()
        self._check_places()
        self._build = open_any(self.run, catalogue(), with_data=True).build
        self._student = self._check_student(student_of(plan.model, self._model))
        length = plan.data.sequence_length
        rows = max(1, COMPARED // length)
        validation, device = self._build.prepared.validation, self._build.device
        self._ids_BT = rows_of(validation, rows, length, device)
        self._plan, self._rate = plan, plan.optimizer.lr
        self._last: Tensor | None = None

    def follow(self) -> None:
        """Run every hop, and measure what each one made.

        Raises:
            ConfigError, UnsupportedError, RunError: a hop fails; what was made before it stays.
        """
        steps: Mapping[str, Callable[[], tuple[list[str], Path]]] = {
            "distil": self._distil,
            "prune": self._prune,
            "recover": self._recover,
            "convert": self._convert,
            "quantize": self._quantize,
            "export": self._export,
        }
        self._measure("run", [], self.run, 0.0)
        self.out.mkdir(parents=True, exist_ok=True)
        self._weights = self._folder_of(self.run)
        write_whole(self.out / STUDENT, self._student_plan())
        names = self._names[: self._end()]
        for number, name in enumerate(names, start=1):
            words, made = steps[name]()
            self.progress.note(f"hop {number} of {len(names)}, {name}: headrace {_typed(words)}")
            begin = time.perf_counter()
            with showing(self.progress):
                call_verb(*words)
            self._measure(name, words, made, time.perf_counter() - begin)

    # --- checks before anything is trained ----------------------------------------------------

    def _end(self) -> int:
        return len(self._names) if self.until is None else self._names.index(self.until) + 1

    def _check_hop(self) -> None:
        """Refuse a last hop that this recipe does not have.

        Raises:
            ConfigError: names those that it has.
        """
        if self.until is not None and self.until not in self._names:
            raise ConfigError(
                f"--until {self.until} is no hop of this recipe for {self.run}, which are "
                f"{', '.join(self._names)}",
                f"--until {nearest(self.until, self._names)}",
            )

    def _check_runtime(self) -> None:
        """Refuse a recipe whose file could not be written, before the hours of its trainings.

        Raises:
            UnsupportedError: with the command that installs what is missing.
        """
        from headrace.compress.quantized_model import check_installed
        from headrace.export.edge import FORMATS as EDGE

        if self._end() > self._names.index("quantize"):
            check_installed()
        if self._end() == len(self._names):
            EDGE[self.recipe.to].check_installed()

    def _check_places(self) -> None:
        """Refuse to write where something is already.

        Raises:
            ConfigError: names what is there.
        """
        taken = [self.run.parent / self._named(name) for name in ("distil", "recover", "convert")]
        for place in (self.out, *taken):
            if place.exists():
                raise ConfigError(
                    f"{place} is there already, and a recipe begins anew",
                    f"name=OTHER --output {shell(f'{self.out}-2')}",
                )

    def _check_student(self, student: "ModelConfig") -> "ModelConfig":
        """Refuse a student that cannot be pruned so far, or whose widths 4 bits do not divide.

        Raises:
            ConfigError, UnsupportedError: says what to change.
        """
        from headrace.compress.pruning import shapes_within

        if self.recipe.rounds and (rest := student.dim % GROUP):
            raise ConfigError(
                f"the student has {student.dim} features, which groups of {GROUP} numbers do not "
                "divide",
                f"model.dim={student.dim + GROUP - rest}",
            )
        if self.recipe.prunes:
            shapes_within(student, self.by, ("channels", "layers"), GROUP)
        return student

    # --- hops ---------------------------------------------------------------------------------

    def _named(self, hop: str) -> str:
        return f"{self._name}-{hop}"

    def _distil(self) -> tuple[list[str], Path]:
        name = self._named("distil")
        words = ["distill", str(self.run), str(self.out / STUDENT), f"name={name}", *self._rest]
        return words, self.run.parent / name

    def _prune(self) -> tuple[list[str], Path]:
        made, student = self.out / "pruned", self.run.parent / self._named("distil")
        cut = ["--by", f"{100 * self.by:g}%", "--only", "channels,layers", "--multiple", str(GROUP)]
        return ["prune", str(student), *cut, *self._most(), "--output", str(made)], made

    def _recover(self) -> tuple[list[str], Path]:
        return self._taught("recover", self.out / "pruned", self.recipe.rounds)

    def _convert(self) -> tuple[list[str], Path]:
        student = self._folder_of(self.run.parent / self._named("distil"))
        words, made = self._taught("convert", student, self.recipe.rounds)
        return [*words, "--with", "rms_norm", "eval.before=true"], made

    def _taught(self, hop: str, start: Path, rounds: bool) -> tuple[list[str], Path]:
        """Return the training that goes on from a folder on the words of the first run."""
        name = self._named(hop)
        words = ["train", str(self.out / STUDENT), f"name={name}"]
        words += [f"model.pretrained={start}", f"data.tokenizer={start}"]
        words += [f"optimizer.lr={RATE * self._rate:.3g}", *self._rest]
        words += ["--with", DISTILLATION, f"techniques.{DISTILLATION}.teacher={self._weights}"]
        if rounds:
            words += ["--with", ROUNDING, f"techniques.{ROUNDING}.to={self.recipe.preset}"]
            words += [f"techniques.{ROUNDING}.group={GROUP}"]
            if not any(word.startswith(f"{END}=") for word in self._rest):
                words.append(f"{END}=0")
        return words, self.run.parent / name

    def _quantize(self) -> tuple[list[str], Path]:
        before, made = Path(self.hops[-1].made), self.out / "quantized"
        words = ["compress", str(before), "--to", self.recipe.preset, *self._most()]
        return [*words, "--output", str(made)], made / self.recipe.preset

    def _export(self) -> tuple[list[str], Path]:
        made = self.out / self.recipe.to
        point = self.hops[-1].made
        words = ["export", point, "--to", self.recipe.to, "--output", str(made)]
        return words, made / FORMATS[self.recipe.to]

    def _most(self) -> list[str]:
        return [] if self.tokens is None else ["--tokens", str(self.tokens)]

    # --- what hops read and write -------------------------------------------------------------

    def _folder_of(self, run: Path) -> Path:
        """Return the folder of a run's weights, which is written where it is not there."""
        from headrace.export.start import beginning

        return beginning(run, catalogue(), self.progress.note).weights

    def _student_plan(self) -> str:
        """Return the plan of the student: the run's own, with the student's shape.

        What only rewrites keys of the model is in the shape already; adapters, rounding and the
        run's own teacher are of the run.
        """
        from headrace.assemble.adapted import AdapterTechnique
        from headrace.export.point import FAKE_QUANTIZED

        keys = self._plan.dump()
        left = {
            name: knobs
            for name, knobs in keys.get("techniques", {}).items()
            if not isinstance(one := self._plan.techniques[name], AdapterTechnique)
            and FAKE_QUANTIZED not in one.composes
            and not any(claim.startswith("config.") for claim in one.claims)
            and name not in (DISTILLATION, "weight_pruning")
        }
        shape = {"pretrained": "", "adapter": ""}
        model = {**self._student.model_dump(mode="json"), **shape}
        tables = {**keys, "model": model, "techniques": left, "name": self._named("distil")}
        return tomli_w.dumps(tables)

    def _measure(self, name: str, words: list[str], made: Path, seconds: float) -> None:
        """Measure what a hop made, note it, and write all hops so far."""
        from headrace.compress.sensitivity import logits_on
        from headrace.export.compression import decoding_speed
        from headrace.train.evaluate import evaluate, finite

        self.progress.note(f"measuring {made}")
        if made.suffix in (".pte", ".onnx"):
            hop = self._of_file(name, words, made, seconds)
        else:
            build = self._opened(made)
            logits = logits_on(build.model, self._ids_BT)
            loss = finite(evaluate(build, self.tokens)).bits_per_byte
            apart = None if self._last is None else float((logits - self._last).abs().max())
            speed = decoding_speed(build.model, self._ids_BT)
            self._last = logits
            hop = Hop(
                name,
                _command(words),
                str(made),
                _bytes_of(made, build),
                loss,
                apart,
                speed,
                seconds=seconds,
            )
        self.hops.append(hop)
        if words:
            text = json.dumps([asdict(one) for one in self.hops], indent=1)
            write_whole(self.out / HOPS_FILE, text)

    def _opened(self, made: Path) -> "Build":
        """Return a model with the validation text of the first run: a run, a point or a folder."""
        from headrace.assemble.build import make_build
        from headrace.export.opened import open_any
        from headrace.export.point import point_plan
        from headrace.model.adapter import read_config
        from headrace.model.companions import CONFIG
        from headrace.parallel.world import World

        if made == self.run:
            return self._build
        if is_point(made) or not (made / CONFIG).is_file():
            return open_any(made, catalogue(), with_data=True).build
        model = read_config(made).model_dump()
        model |= {"pretrained": str(made), "precision": "fp32"}
        plan = point_plan(self._build).replaced(model=model)
        return make_build(plan, self._build.prepared, World(), self._build.device)

    def _of_file(self, name: str, words: list[str], file: Path, seconds: float) -> Hop:
        """Return what its own runtime says of a file, in a process of its own.

        Raises:
            RunError: the process fails.
        """
        asked = [sys.executable, "-m", "headrace", "run", str(file), "--measure", "--json"]
        asked += ["--of", self.hops[-1].made, *self._most()]
        ended = subprocess.run(asked, stdout=subprocess.PIPE, text=True, check=False)
        try:
            reading = json.loads(ended.stdout)
            if ended.returncode:
                raise RunError(reading["error"], reading["remedy"])
        except ValueError:
            raise RunError(
                f"measuring {file} ended with exit code {ended.returncode}",
                f"headrace run {shell(file)} --measure",
            ) from None
        drift = json.loads(file.with_name("headrace.json").read_text())["drift"]
        return Hop(
            name,
            _command(words),
            str(file),
            reading["bytes"],
            reading["bits_per_byte"],
            drift,
            reading["tokens_per_s"],
            reading["peak_bytes"],
            seconds,
            reading["model_bits_per_byte"],
        )


def student_of(model: "ModelConfig", given: Mapping[str, str]) -> "ModelConfig":
    """Return the shape of a student: deep and thin, with the layers of its teacher.

    Heads, features and hidden features are halved, since below a billion parameters depth is worth
    more than width (arXiv 2402.14905). Heads keep their size.

    Args:
        model: the teacher.
        given: keys of `model` that the user sets, as words.

    Raises:
        ConfigError: a key is none, or the shape makes no sense.
    """
    from headrace.core.files import toml_value
    from headrace.core.model_config import ModelConfig
    from headrace.core.strict import read_table

    heads = max(1, model.heads // 2)
    groups = max(1, model.resolved_kv_heads // 2)
    width = model.resolved_head_dim
    ffn = -(-model.resolved_ffn // 2)
    sizes = {
        "heads": heads,
        "kv_heads": groups if heads % groups == 0 else heads,
        "head_dim": width,
        "dim": heads * width if model.heads * width == model.dim else model.dim // 2,
        "ffn": -(-ffn // GROUP) * GROUP,
    }
    sizes |= {key.removeprefix("model."): toml_value(word, key) for key, word in given.items()}
    return read_table(ModelConfig, {**model.model_dump(), **sizes}, "model")


def hop_rows(hops: Sequence[Hop]) -> Iterator[list[str]]:
    """Yield a row of each hop."""
    for hop in hops:
        apart = "" if hop.logits_from_before is None else f"{hop.logits_from_before:.3g}"
        peak = "" if hop.peak_bytes is None else format_bytes(hop.peak_bytes)
        loss, speed = f"{hop.bits_per_byte:.4f}", f"{hop.tokens_per_s:,.0f}"
        if hop.before_bits_per_byte is not None:
            loss += f" (before it, so read, {hop.before_bits_per_byte:.4f})"
        yield [hop.name, format_bytes(hop.bytes), loss, apart, speed, peak]


def _bytes_of(made: Path, build: "Build") -> int:
    """Return the bytes of a model's weights: of their file, and of a run in fp32."""
    files = [*made.glob("*.safetensors")]
    if files:
        return sum(file.stat().st_size for file in files)
    return sum(4 * parameter.numel() for parameter in build.model.parameters())


def _typed(words: Sequence[str]) -> str:
    return " ".join(map(shell, words))


def _command(words: Sequence[str]) -> str:
    return f"headrace {_typed(words)}" if words else ""

"""Define the natural runs: plans as people start with them, with nothing planted into them.

A run is a shape, words that change its plan (headrace/plan/changes.py), and a number of steps. A
shape is one of SHAPES, a plan of plans/, a recipe or a file. `-*` takes out every technique, so
that a plan of plans/ becomes what a first script has. A run that was measured once is not changed
any more: another one gets another id, and plans/small.toml is what recipe `small` was then.
"""

import tomllib
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import receipts
import tomli_w

from headrace.cli.catalogue import catalogue
from headrace.costs.count import total_parameters
from headrace.plan.changes import changed
from headrace.plan.plan import Plan
from headrace.recipes import recipes

BARE = "-*"
"""The word for leaving out every technique."""
COMMON = (
    "guard=false",
    "checkpoint.every_steps=0",
    "eval.every_steps=100000",
    "eval.tokens=4096",
    "schedule.steps=2000",
)
"""Set in every plan, so that a short run is mostly steps."""
RATES = {"cuda": 2e13, "cpu": 5e8}
"""Parameters times tokens that a whole measurement gets through in a second, about; by device."""
SHAPES = {
    "300k": ("headrace-mini", "dim = 64\nlayers = 3\nheads = 2\nffn = 176", 2048, 128, 4096),
    "1m": ("headrace-mini", "dim = 128\nlayers = 3\nheads = 4\nffn = 352", 2048, 128, 4096),
    "5m": ("headrace-mini", "dim = 256\nlayers = 4\nheads = 4\nffn = 704", 4096, 256, 4096),
    "gpt2-8m": ("gpt2", "dim = 256\nlayers = 6\nheads = 8\nvocab = 8192", 4096, 256, 2048),
    "gpt2": ("gpt2", "", 4096, 1024, 16384),
}
"""name -> (family, other keys of the model, entries of the tokenizer, tokens of a row, a step)"""


@dataclass(frozen=True)
class Run:
    """Describe one run of the list.

    Args:
        id: its name in the rows.
        device: "cuda" or "cpu".
        shape: of the model and the batch.
        words: that change the shape's plan.
        steps: of the run; two of them are warm-up.
    """

    id: str
    device: str
    shape: str
    words: str = ""
    steps: int = 48

    @cached_property
    def plan(self) -> Plan:
        """Return the checked plan; it names no folders."""
        known, words = catalogue(), self.words.split()
        keys = [*COMMON, f"device={self.device}", f"goal.steps={self.steps}", f"name={self.slug}"]
        start = Plan.read(text_of(self.shape), known, overrides=keys)
        added = {w[1:] for w in words if w[0] == "+"}
        if BARE in words:
            gone = [f"-{name}" for name in start.techniques if name not in added]
            words = [*gone, *(w for w in words if w != BARE)]
        return changed(start, words, known)

    @cached_property
    def parameters(self) -> int:
        """Return the number of parameters, with an embedding for the tokenizer."""
        sizes = {} if self.plan.model.vocab else {"vocab": self.plan.data.vocab}
        return total_parameters(self.plan.model.model_copy(update=sizes))

    @cached_property
    def sha256(self) -> str:
        """Return the plan's fingerprint."""
        return receipts.sha256(self.plan.dump())

    @property
    def cost(self) -> float:
        """Return the approximate seconds by which parts of the list are made alike."""
        return 30.0 + self.parameters * self.plan.batch.tokens / RATES[self.device]

    @property
    def slug(self) -> str:
        """Return the id as the name of a folder."""
        return self.id.replace(" ", "-").replace(",", "")

    def in_folder(self, work: Path) -> Plan:
        """Return the plan with its data and its run under a folder."""
        data = self.plan.data.model_copy(update={"directory": str(work / "data")})
        return self.plan.replaced(directory=str(work / "runs"), data=data)


def text_of(shape: str) -> str:
    """Return a shape's plan as TOML."""
    if shape in SHAPES:
        family, model, vocab, length, tokens = SHAPES[shape]
        tables = {
            "name": shape,
            "model": {"family": family, **tomllib.loads(model)},
            "data": {"vocab": vocab, "sequence_length": length},
            "goal": {"steps": 1},
            "batch": {"tokens": tokens},
        }
        return tomli_w.dumps(tables)
    file = receipts.plan_file(shape)
    return (file if file.is_file() else recipes().get(shape, file)).read_text()


FP32 = "model.precision=fp32"


def _gpu(id: str, shape: str, words: str = "", steps: int = 48) -> Run:
    return Run(id, "cuda", shape, words, steps)


def _cpu(id: str, shape: str, words: str = "", steps: int = 48) -> Run:
    return Run(id, "cpu", shape, words, steps)


RUNS = (
    _gpu("1m fp32 eager", "1m", FP32),
    _gpu("1m fp32 compiled", "1m", f"{FP32} +torch_compile"),
    _gpu("demo bf16 eager", "demo"),
    _gpu("demo fp32 compiled", "demo", f"{FP32} +torch_compile"),
    _gpu("5m bf16 eager micro", "5m", "batch.micro_sequences=4"),
    _gpu(
        "5m fp32 compiled chunked",
        "5m",
        f"{FP32} +torch_compile +chunked_cross_entropy "
        "techniques.chunked_cross_entropy.chunk_tokens=1024",
    ),
    _gpu("small fp32 eager", "small", FP32),
    _gpu("small bf16 eager long", "small", "data.sequence_length=2048 batch.tokens=16384"),
    _gpu("small bf16 compiled", "small", "+torch_compile"),
    _gpu("small fp32 eager packed", "small", f"{FP32} +document_packing batch.tokens=16384"),
    _gpu("60m fp32 eager", "60m", f"{BARE} {FP32} batch.tokens=8192", 36),
    _gpu("60m bf16 eager micro", "60m", f"{BARE} batch.tokens=32768 batch.micro_sequences=4", 36),
    _gpu("60m bf16 compiled", "60m", f"{BARE} +torch_compile batch.tokens=32768", 36),
    _gpu("gpt2 bf16 eager", "gpt2", "batch.tokens=8192", 36),
    _gpu("gpt2 fp32 compiled", "gpt2", f"{FP32} +torch_compile batch.tokens=4096", 30),
    _gpu("160m bf16 recipe", "160m", "batch.tokens=16384", 36),
    _gpu("160m bf16 eager checkpointed", "160m", f"{BARE} +full_checkpoint batch.tokens=16384", 30),
    _gpu(
        "160m bf16 eager long", "160m", f"{BARE} data.sequence_length=8192 batch.tokens=16384", 30
    ),
    _gpu("330m bf16 eager micro", "330m", f"{BARE} batch.tokens=8192 batch.micro_sequences=1", 30),
    _gpu("330m fp32 eager", "330m", f"{BARE} {FP32} batch.tokens=2048", 30),
    _gpu(
        "400m bf16 compiled checkpointed",
        "400m",
        f"{BARE} +torch_compile techniques.torch_compile.scope=block +full_checkpoint "
        "batch.tokens=8192",
        30,
    ),
    _gpu(
        "400m fp32 compiled",
        "400m",
        f"{BARE} {FP32} +torch_compile techniques.torch_compile.scope=block batch.tokens=2048",
        30,
    ),
    _gpu("1b bf16 recipe", "1b", "model.vocab=32768 batch.tokens=8192", 30),
    _gpu(
        "1b bf16 eager micro",
        "1b",
        f"{BARE} model.vocab=32768 data.sequence_length=2048 batch.tokens=4096 "
        "batch.micro_sequences=1",
        30,
    ),
    _gpu(
        "1b fp32 eager",
        "1b",
        f"{BARE} {FP32} model.vocab=32768 data.sequence_length=1024 batch.tokens=1024",
        30,
    ),
    _cpu("300k eager", "300k", "", 60),
    _cpu("300k compiled", "300k", "+torch_compile batch.tokens=1024", 60),
    _cpu("1m eager", "1m", "", 60),
    _cpu("1m compiled", "1m", "+torch_compile", 60),
    _cpu("1m eager micro", "1m", "batch.micro_sequences=1 batch.tokens=2048", 60),
    _cpu("demo eager", "demo", "", 48),
    _cpu("demo compiled", "demo", "+torch_compile", 48),
    _cpu("demo eager long", "demo", "data.sequence_length=512", 48),
    _cpu("tiny eager", "tiny", "batch.tokens=2048", 48),
    _cpu(
        "tiny compiled chunked",
        "tiny",
        "batch.tokens=2048 +torch_compile +chunked_cross_entropy "
        "techniques.chunked_cross_entropy.chunk_tokens=512",
        48,
    ),
    _cpu("5m eager", "5m", "batch.tokens=2048", 40),
    _cpu("5m compiled micro", "5m", "+torch_compile batch.tokens=2048 batch.micro_sequences=2", 40),
    _cpu("5m eager checkpointed", "5m", "batch.tokens=1024 +full_checkpoint", 40),
    _cpu("small eager", "small", "batch.tokens=1024", 34),
    _cpu("small compiled", "small", "+torch_compile batch.tokens=1024", 34),
    _cpu("gpt2-8m eager packed", "gpt2-8m", "+document_packing batch.tokens=1024", 40),
)
"""All natural runs: 25 for a GPU, of 1M to 1.1B parameters, and 16 for a CPU, of 0.3M to 14M."""

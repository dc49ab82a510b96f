"""Measure an exported file by its own runtime: loss, distance from its model, memory and latency.

The loss is that of validation rows, token by token: the runtime gives the log-probability of each
target after the tokens before it. The model that the file was made of is evaluated on the same
rows, so that both losses can be compared to the last digit. Memory is what the process grew by
while the runtime opened the file and decoded, the runtime's own libraries included. So a file is
measured in a process of its own.

A file has no entries that pad the vocabulary, and those of the model are left out too. llama.cpp
has no place for a token behind a full row, so the last target of such a row is not counted.

Shapes: B rows, T tokens, V vocabulary.
"""

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.sockets import Build, MicroBatch
from headrace.compress.sensitivity import logits_on
from headrace.core.errors import ConfigError
from headrace.core.files import parse_object, shell
from headrace.core.folders import is_point
from headrace.core.units import format_bytes
from headrace.export.decoding import PLACES, TIMES
from headrace.export.edge_runtime import RECORD
from headrace.export.opened import open_any
from headrace.export.runtime import Runtime, open_runtime, run_beside
from headrace.model.head import IGNORED
from headrace.plan.technique import Catalogue
from headrace.train.evaluate import evaluation_batches

TOKENS = 1024
"""Validation tokens on which a file is measured, unless the command says more."""
STATUS, CLEAR = Path("/proc/self/status"), Path("/proc/self/clear_refs")
"""Files in which Linux tells the memory of a process, and takes that its peak begins anew."""


class GrownMemory:
    """Measure by how many bytes the resident memory of this process grows at most."""

    def __init__(self) -> None:
        with suppress(OSError):
            CLEAR.write_text("5")
        self._before = _resident("VmRSS")

    def read(self) -> int | None:
        """Return the bytes since this was made; None where the system does not tell them."""
        peak = _resident("VmHWM")
        return None if self._before is None or peak is None else max(0, peak - self._before)


def _resident(field: str) -> int | None:
    """Return a number of bytes that Linux tells of this process; None on other systems."""
    with suppress(OSError):
        for line in STATUS.read_text().splitlines():
            if line.startswith(f"{field}:"):
                return 1024 * int(line.split()[1])
    return None


@dataclass(frozen=True)
class FileReading:
    """Hold what was measured of a file."""

    runtime: str
    bytes: int
    """Size of the file, with what belongs to it beside it."""
    peak_bytes: int | None
    """Memory of opening the file and decoding; None where the system does not tell it."""
    token_s: float
    """Seconds of one token, decoding one sequence."""
    bits_per_byte: float
    model_bits_per_byte: float
    """Loss of the model that it was made of, on the same rows."""
    largest_nats: float
    """Largest difference of a log-probability to that model's."""
    tokens: int
    """Validation targets that both were evaluated on."""
    model: str

    def to_dict(self) -> dict[str, Any]:
        """Return it as JSON values."""
        return {**asdict(self), "tokens_per_s": 1 / self.token_s}

    @property
    def lines(self) -> list[str]:
        """Return it as lines for a reader."""
        peak = "not told here" if self.peak_bytes is None else format_bytes(self.peak_bytes)
        return [
            f"{self.runtime}: {1 / self.token_s:,.0f} tokens/s, {1e3 * self.token_s:.3g} ms each; "
            f"the file has {format_bytes(self.bytes)}, and memory to run it is {peak}",
            f"{self.bits_per_byte:.4f} bits per byte on {self.tokens:,} validation targets; "
            f"{self.model} has {self.model_bits_per_byte:.4f}, and log-probabilities differ by at "
            f"most {self.largest_nats:.2g} nats",
        ]


def measure_file(
    file: Path, catalogue: Catalogue, *, of: Path | None = None, tokens: int | None = None
) -> FileReading:
    """Return what is measured of an exported file by its own runtime.

    Args:
        file: it ends in .gguf, .onnx or .pte.
        catalogue: the techniques and model families.
        of: the run or point that it was made of; without it the one in whose folder the file lies.
        tokens: the most validation tokens.

    Raises:
        ConfigError: the file is damaged, its model is not known, or reads text as other tokens.
        UnsupportedError: its runtime is not installed.
    """
    memory = GrownMemory()
    runtime: Any = open_runtime(file, "", PLACES)
    places = min(PLACES, runtime.context or PLACES)
    prompt = max(1, places // 3)
    token_s = min(runtime.decode_s(prompt, places - prompt) for _ in range(TIMES))
    peak = memory.read()
    source = of or _source_of(file, runtime)
    build = open_any(source, catalogue, with_data=True).build
    room = build.plan.data.sequence_length
    reader: Any = open_runtime(file, "x" * room, 0)  # with places for a whole row
    _check_tokens(reader, build, file, source)
    full = reader.context - 1 if file.suffix == ".gguf" and reader.context else None
    loss = _Loss(reader, build, full)
    for micro in evaluation_batches(build, tokens or TOKENS):
        loss.add(micro)
    bits, whole = loss.bits_per_byte()
    return FileReading(
        runtime.name,
        size_of(file),
        peak,
        token_s,
        bits,
        whole,
        loss.largest,
        loss.targets,
        str(source),
    )


def size_of(file: Path) -> int:
    """Return the bytes of an exported file, with the weights that may lie beside it."""
    record = file.with_name(RECORD)
    names = [file.name]
    if record.is_file() and file.suffix != ".gguf":
        names = [Path(name).name for name in parse_object(record.read_bytes())["sha256"]]
    return sum(file.with_name(name).stat().st_size for name in names)


def _source_of(file: Path, runtime: Runtime) -> Path:
    """Return the run or the point in whose folder a file lies.

    Raises:
        ConfigError: it lies in none.
    """
    run = run_beside(file, runtime.origin)
    point = next((folder for folder in file.resolve().parents if is_point(folder)), None)
    if (source := run or point) is None:
        raise ConfigError(
            f"{file} lies in no folder of the model that it was made of, whose validation text and "
            "loss it is compared with",
            f"headrace run {shell(file)} --measure --of RUN",
        )
    return source


def _check_tokens(runtime: Runtime, build: Build, file: Path, source: Path) -> None:
    """Refuse a model whose tokenizer reads text in another way than the file's.

    Raises:
        ConfigError: with the ids of both.
    """
    tokenizer = build.prepared.tokenizer
    ids = [*map(int, build.prepared.validation.read(0, min(9, build.prepared.validation.tokens)))]
    text = tokenizer.decode([one for one in ids if one != tokenizer.document_token])[:8]
    ours = tokenizer.encode_batch([text])[0].tolist()
    theirs = runtime.encode(text)[1:]
    if ours != theirs:
        raise ConfigError(
            f"{file} reads {text!r} as the tokens {theirs}, and {source} as {ours}: its validation "
            "text is in another tokenizer",
            f"headrace run {shell(file)} --measure --of RUN, the one that it was made of",
        )


class _Loss:
    """Sum the loss of a file and of its model over validation rows.

    Args:
        runtime: has opened the file.
        build: the model, with its text.
        most: the most tokens that the runtime reads; None for whole rows.
    """

    def __init__(self, runtime: Runtime, build: Build, most: int | None) -> None:
        self.runtime, self.build, self.most = runtime, build, most
        self.targets, self.bytes = 0, 0
        self.nats, self.model_nats, self.largest = 0.0, 0.0, 0.0
        self._bytes_V = build.prepared.tokenizer.token_bytes

    def add(self, micro: MicroBatch) -> None:
        """Add the targets of a micro-batch, each document of a row by itself."""
        places_BT = micro.rows.positions_BT.expand(micro.ids_BT.shape)
        for ids_T, targets_T, places_T in zip(
            micro.ids_BT, micro.targets_BT, places_BT, strict=True
        ):
            for begin, end in _documents(places_T.tolist()):
                end = end if self.most is None else min(end, begin + self.most)
                self._add(ids_T[begin:end], targets_T[begin:end].tolist())

    def _add(self, ids_T: torch.Tensor, targets: list[int]) -> None:
        counted = [n for n, target in enumerate(targets) if target != IGNORED]
        if not counted:
            return
        ids_T = ids_T[: counted[-1] + 1]
        entries = self.build.prepared.tokenizer.vocab
        with self.build.autocast():
            logits_TV = logits_on(self.build.model, ids_T[None])[0, :, :entries]
        ours_TV = logits_TV.double().log_softmax(-1).cpu()
        ids = ids_T.tolist()
        for place in range(len(ids)):  # every token, so that the cache grows by one
            theirs = self.runtime.log_probabilities(ids[: place + 1])
            if targets[place] == IGNORED:
                continue
            apart = ours_TV[place, [*theirs]] - torch.tensor([*theirs.values()]).double()
            self.largest = max(self.largest, float(apart.abs().max()))
            self.nats -= theirs[targets[place]]
            self.model_nats -= float(ours_TV[place, targets[place]])
            self.targets += 1
            self.bytes += int(self._bytes_V[targets[place]])

    def bits_per_byte(self) -> tuple[float, float]:
        """Return the bits per byte of the file, and of its model.

        Raises:
            ConfigError: no target stands for text.
        """
        size = self.bytes * self.build.prepared.validation.raw_share
        if not size:
            raise ConfigError(
                f"the {self.targets:,} targets of these rows stand for no byte of text",
                "--tokens N with more of them",
            )
        return self.nats / math.log(2) / size, self.model_nats / math.log(2) / size


def _documents(places: list[int]) -> Iterator[tuple[int, int]]:
    """Yield where each document of a row begins and ends, by the places of its tokens."""
    begins = [n for n, place in enumerate(places) if place == 0] or [0]
    yield from zip(begins, [*begins[1:], len(places)], strict=True)

"""Run what `headrace export` wrote for a device: a tokenizer, a cache, and one step of a runtime.

The cache is kept between calls, as a program on a device keeps it: a text that goes on from what
was read before costs its new tokens alone.
"""

import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from importlib import import_module
from importlib.metadata import version
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.files import parse_object, sha256_of, shell
from headrace.core.native import call_native, silent_library
from headrace.data.tokenizer import Tokenizer
from headrace.export.executorch_file import PIECE, check_identifier
from headrace.export.executorch_file import check_installed as executorch_installed
from headrace.export.gguf import Origin
from headrace.export.llama_cpp import Continued, TokenWork, refuse_long
from headrace.export.onnx_file import check_installed as onnx_installed
from headrace.export.onnx_file import quiet

RECORD = "headrace.json"
"""The file beside an exported one that says what it is."""
VERSION = 1
IMAGES = "images"
"""The key of a record that says which network of images a file holds."""


def read_record(file: Path) -> dict[str, Any]:
    """Return what the record beside a file says of it, compared with the file.

    Raises:
        ConfigError: there is none, a later version wrote it, or a file is damaged.
    """
    path = file.with_name(RECORD)
    to, run, folder = "onnx" if file.suffix == ".onnx" else "executorch", "RUN", file.parent
    try:
        record = parse_object(path.read_bytes())
        if isinstance(origin := record.get("origin"), dict):
            run = str(origin.get("run", run))
        if record["format"] != VERSION:
            raise ValueError(f"has format {record['format']}, and this version reads {VERSION}")
        for name, digest in record["sha256"].items():
            if digest != (now := sha256_of(file.with_name(Path(name).name))):
                raise ValueError(f"has sha256 {digest[:12]} of {name}, which has {now[:12]}")
        if file.name not in record["sha256"]:
            raise ValueError(f"is of {' and '.join(record['sha256'])}, not of {file.name}")
    except (OSError, ValueError, KeyError) as error:
        what = f"lacks {error}" if isinstance(error, KeyError) else str(error)
        beside = f"{path.name} beside it {what}"
        if isinstance(error, OSError):
            beside = f"{error.filename} cannot be read ({error.strerror})"
        raise ConfigError(
            f"{file} is not as it was written: {beside}",
            f"headrace export {shell(run)} --to {to} --output {shell(f'{folder}-2')}",
        ) from None
    return record


def images_record(file: Path) -> dict[str, Any] | None:
    """Return the record of a file that tells images apart; None of any other file.

    Raises:
        ConfigError: see `read_record`.
    """
    if file.suffix not in (".onnx", ".pte") or not file.is_file():
        return None
    record = read_record(file)
    return record if IMAGES in record else None


class EdgeRuntime(ABC):
    """A runtime has opened one file that was exported for a device."""

    name: str
    """its name and version"""
    reads_all: ClassVar[bool] = False
    """whether a token reads all places of the cache, filled or not"""

    def __init__(self, file: Path, prompt: str, tokens: int) -> None:
        """Open a file.

        Args:
            file: the file, with its record and tokenizer beside it.
            prompt: what is to be continued.
            tokens: the most tokens to add.

        Raises:
            ConfigError: it is damaged, or it is no file of this format.
            UnsupportedError: its runtime is not installed.
        """
        self._file, self._tokens = file, tokens
        self.record = read_record(file)
        self._tokenizer = Tokenizer.load(file.with_name("tokenizer.json"))
        self.origin = Origin(**origin) if (origin := self.record["origin"]) else None
        self._seen: list[int] = []
        self._last = np.zeros(0, dtype=np.float32)
        self._open(file)

    @abstractmethod
    def _open(self, file: Path) -> None:
        """Open the file by the runtime, and set `name`."""

    @abstractmethod
    def _step(self, ids: Sequence[int], seen: int) -> np.ndarray:
        """Return the logits after the last of some tokens behind `seen` others, fp32 [V]."""

    def encode(self, text: str) -> list[int]:
        """Return the ids of a text, with the token that begins it; none is special by its name.

        Raises:
            ConfigError: the text and the tokens to add are longer than the file has places.
        """
        ids = [self._tokenizer.document_token, *self._tokenizer.encode_batch([text])[0].tolist()]
        refuse_long(self._file, self.record["context"], len(ids), self._tokens)
        return ids

    def continue_(self, ids: Sequence[int], tokens: int) -> Continued:
        """Continue `ids` by at most so many of the likeliest tokens."""
        return call_native(lambda: self._continue(ids, tokens))

    def _continue(self, ids: Sequence[int], tokens: int) -> Continued:
        stop, added = self._tokenizer.document_token, list[int]()
        self._seen = []
        begin = time.perf_counter()
        logits = self.logits_after(ids)
        first = time.perf_counter()
        while len(added) < tokens and (best := int(logits.argmax())) != stop:
            added.append(best)
            if len(added) < tokens:
                logits = self.logits_after([*ids, *added])
        decoding_s = time.perf_counter() - first
        rates = len(ids) / (first - begin), max(0, len(added) - 1) / max(decoding_s, 1e-9)
        return Continued(added, self._tokenizer.decode(added), *rates)

    @property
    def context(self) -> int:
        """Return the tokens of the longest text."""
        return int(self.record["context"])

    @property
    def quantized(self) -> str:
        """Return the preset that its matrices are stored in."""
        return self.record["spec"]["name"]

    def work(self, places: int) -> TokenWork:
        """Return what a token reads and multiplies behind so many others."""
        record = self.record
        seen = record["context"] if self.reads_all else places
        numbers = 2 * record["layers"] * record["kv_heads"] * record["head_dim"] * seen
        return TokenWork(record["multiplied_bytes"], 4 * numbers, record["multiplied"])

    def decode_s(self, prompt: int, tokens: int) -> float:
        """Return the seconds that one token takes, over `tokens` of them behind a prompt."""
        ids = np.random.default_rng(0).integers(0, self.record["vocab"], prompt + tokens).tolist()
        self._seen = []
        self.logits_after(ids[:prompt])
        begin = time.perf_counter()
        for end in range(prompt, prompt + tokens):
            self.logits_after(ids[: end + 1])
        return (time.perf_counter() - begin) / tokens

    def log_probabilities(self, ids: Sequence[int]) -> dict[int, float]:
        """Return the log-probability in nats of each token that may follow `ids`, by id."""
        logits = self.logits_after(ids).astype(np.float64)
        most = logits.max()
        whole = logits - most - np.log(np.exp(logits - most).sum())
        return dict(enumerate(whole.tolist()))

    def logits_after(self, ids: Sequence[int]) -> np.ndarray:
        """Return the logits after a text, fp32 [V]; what the cache holds of it is not read again.

        Args:
            ids: at least one.
        """
        wanted, seen = [*ids], len(self._seen)
        if wanted == self._seen:
            return self._last
        if wanted[:seen] != self._seen:
            seen = 0
        self._last = self._step(wanted[seen:], seen)
        self._seen = wanted
        return self._last


class OnnxRuntime(EdgeRuntime):
    """ONNX Runtime has opened a file."""

    def _open(self, file: Path) -> None:
        onnx_installed()
        onnxruntime = import_module("onnxruntime")
        self.name = f"ONNX Runtime {onnxruntime.__version__}"
        options = onnxruntime.SessionOptions()
        options.log_severity_level = 3
        try:
            self._session = onnxruntime.InferenceSession(
                file, options, providers=["CPUExecutionProvider"]
            )
        except Exception as error:  # its errors have no class of their own
            raise UnsupportedError(
                f"{self.name} cannot load {shell(file)}: {str(error).splitlines()[0]}",
                "pip install --upgrade onnxruntime",
            ) from None
        self._inputs = [one.name for one in self._session.get_inputs()]
        self._past: list[np.ndarray] = []

    def _step(self, ids: Sequence[int], seen: int) -> np.ndarray:
        if not seen:
            shape = (1, self.record["kv_heads"], 0, self.record["head_dim"])
            self._past = [np.zeros(shape, np.float32) for _ in self._inputs[1:]]
        given = [np.array([ids], dtype=np.int64), *self._past]
        logits, *self._past = self._session.run(None, dict(zip(self._inputs, given, strict=True)))
        return np.asarray(logits)[0, -1]


class Executorch(EdgeRuntime):
    """ExecuTorch has opened a program, in its Python runtime."""

    reads_all: ClassVar[bool] = True

    def _open(self, file: Path) -> None:
        executorch_installed()
        with quiet():
            runtime = import_module("executorch.runtime")
        self.name = f"ExecuTorch {version('executorch')}"
        try:
            check_identifier(file)
            with silent_library():
                self._program = runtime.Runtime.get().load_program(file)
                self._method: Any = self._program.load_method("forward")
        except (RuntimeError, ValueError) as error:
            raise UnsupportedError(
                f"{self.name} cannot load {shell(file)}: {str(error).splitlines()[0]}",
                "pip install --upgrade executorch",
            ) from None

    def _step(self, ids: Sequence[int], seen: int) -> np.ndarray:
        import torch

        logits = None
        for begin in range(0, len(ids), PIECE):
            piece = torch.tensor([[*ids[begin : begin + PIECE]]])
            logits = self._method.execute([piece, torch.tensor([seen + begin])])[0]
        assert logits is not None
        return logits[0].numpy().copy()


RUNTIMES: dict[str, type[EdgeRuntime]] = {".onnx": OnnxRuntime, ".pte": Executorch}
"""What opens a file, by the end of its name."""

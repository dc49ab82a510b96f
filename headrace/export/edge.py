"""Write a model for a device: one folder with the file that a runtime runs, and what it is.

The folder has `model.onnx` or `model.pte`, `tokenizer.json`, and `headrace.json`: the run, the
quantization spec, the longest text, and the sha256 of the file. Codes are those of the one spec, by
the functions that training and evaluation use. Before the folder is there its own runtime runs the
file, and the largest difference of a logit to the fake-quantized model is told; both decode with a
cache, token by token.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace import __version__
from headrace.assemble.sockets import Build
from headrace.compress.quantized_model import (
    Stored,
    faking,
    formats_of,
    is_tied,
    matrices_of,
    quantize_model,
)
from headrace.compress.spec import PRESETS, NumberFormat, QuantizationSpec
from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.files import sha256_of
from headrace.core.remedy import Remedy
from headrace.export import executorch_file, onnx_file
from headrace.export.cached import CachedDecoder, StaticDecoder, decoded
from headrace.export.edge_runtime import RECORD, RUNTIMES, VERSION
from headrace.export.folder import new_folder, write_json
from headrace.export.gguf import Origin
from headrace.export.run import refuse_parts
from headrace.optim.roles import role_of

COMPARED = 24
"""Tokens on which a new file is compared with the fake-quantized model, at most."""
EQUAL = 1e-4
"""Difference of logits up to which a file computes what the model does. Where activations have
codes, sums that differ in their last bit give another code now and then, and logits differ after
that token."""
WHOLE = QuantizationSpec(name="fp32")


@dataclass(frozen=True)
class EdgeFormat:
    """Say what one format of files for devices holds."""

    file: str
    """the name of the file"""
    presets: tuple[str, ...]
    """what `--quantize` takes, the default first"""
    always: str
    """the preset of these that every model has"""
    activations: str
    """what quantized matmuls read, by `QuantizationSpec.activations`"""
    runtime: str
    """what runs it"""

    check_installed: Callable[[], None]
    """refuses to go on without what writes and runs it"""


FORMATS: dict[str, EdgeFormat] = {
    "onnx": EdgeFormat(
        "model.onnx",
        ("fp32", "int8", "int4"),
        "int8",
        "none",
        "ONNX Runtime",
        onnx_file.check_installed,
    ),
    "executorch": EdgeFormat(
        "model.pte",
        ("fp32", "8da4w"),
        "fp32",
        "int8_asymmetric",
        "XNNPACK",
        executorch_file.check_installed,
    ),
}
"""By the word that `headrace export --to` takes."""


def spec_of(to: str, quantize: str | None, trained: QuantizationSpec | None) -> QuantizationSpec:
    """Return how a file's matrices are stored.

    Args:
        to: the format, of `FORMATS`.
        quantize: the preset that was typed; without one it is what the run was trained for, if the
            format has that, else fp32.
        trained: the spec that the run was trained for; None where it was trained for none.

    Raises:
        ConfigError: the format has no such preset.
    """
    presets = FORMATS[to].presets
    if quantize is None:
        return trained if trained is not None and trained.name in presets else WHOLE
    if quantize not in presets:
        near = nearest(quantize, presets)
        raise ConfigError(
            f"--quantize {quantize} is none of {to}'s, which are {', '.join(presets)}",
            f"--quantize {near if near in presets else presets[0]}",
        )
    if trained is not None and trained.name == quantize:
        return trained
    return PRESETS.get(quantize, WHOLE)


def check_spec(build: Build, to: str, spec: QuantizationSpec, *, is_point: bool) -> None:
    """Refuse a spec that the runtime of a format cannot compute as it is.

    Args:
        build: the model.
        to: the format.
        spec: how its matrices are stored.
        is_point: whether they are stored already.

    Raises:
        ConfigError: groups do not divide a matrix.
        UnsupportedError: names what the runtime lacks.
    """
    one = FORMATS[to]
    remedy = rerun_with("--quantize", one.always, verb="export")
    if is_point:
        remedy = f"headrace export RUN --to {to} --quantize {one.always}, of the run itself"
    formats = formats_of(build.model, spec, lambda group: Remedy(text=remedy))
    lacking = [
        f"{kind.dtype} in groups of {kind.group} with scales in {kind.scales} ({name})"
        for name, kind in formats.items()
        if not _computes(to, name, kind, build.model.get_parameter(name).size(1))
    ]
    if formats and spec.activations != one.activations:
        lacking.insert(0, f"matmuls that read activations = {spec.activations!r}")
    if lacking:
        raise UnsupportedError(
            f"{one.runtime} computes no {lacking[0]}, as {spec.name} has", remedy
        )


def _computes(to: str, name: str, kind: NumberFormat, columns: int) -> bool:
    """Return whether a runtime multiplies with a matrix of this format, or looks its rows up."""
    if kind.dtype not in ("int8", "int4") or not kind.symmetric:
        return False
    groups = kind.groups_of(columns)
    if to == "onnx":
        return onnx_file.block_of(columns, groups) >= onnx_file.LEAST_BLOCK
    if kind.dtype == "int8" or role_of(name, 2) == "embeddings":
        return kind.dtype == "int8" and groups == 1
    return kind.scales == "bf16" and kind.group > 0 and kind.group % executorch_file.GROUP == 0


@dataclass
class EdgeExport:
    """Hold what is written, and what was found of it.

    Args:
        build: the plain model, in fp32 on the host, which the export uses up.
        to: the format, of `FORMATS`.
        spec: how its matrices are stored.
        stored: these; they are rounded to the nearest codes without it.
        context: tokens of the longest text.
        name: of the model.
        origin: the run whose model it is, where there is one.
        template: the chat template; "" for none.
    """

    build: Build
    to: str
    spec: QuantizationSpec
    context: int
    name: str
    origin: Origin | None = None
    stored: Stored | None = None
    template: str = ""
    drift: float = 0.0
    """Largest difference of a logit to the fake-quantized model."""
    equal: float = 0.0
    """Share of the tokens after which no logit differs by more than `EQUAL`."""
    bytes: int = 0
    """Size of the file, with what lies beside it."""
    multiplied: int = 0
    """Weights that a token is multiplied with."""
    multiplied_bytes: int = 0
    """Bytes of these as the spec stores them, scales included."""
    files: list[Path] = field(default_factory=list)

    def write(self, output: Path, run: Path) -> Path:
        """Write the folder, and return the file in it.

        Args:
            output: the new folder.
            run: the folder that error messages name.

        Raises:
            ConfigError: the folder has files already.
            UnsupportedError: the runtime lacks a part of the model, or is not installed.
        """
        kind = FORMATS[self.to]
        kind.check_installed()
        refuse_parts(self.build, self.to, run)
        check_spec(self.build, self.to, self.spec, is_point=self.stored is not None)
        if self.stored is None:
            self.stored = quantize_model(self.build.model, self.spec)
        self._count()
        tokenizer = self.build.prepared.tokenizer
        with new_folder(output) as aside:
            ids = self._ids(tokenizer.vocab, tokenizer.document_token)
            expected = self._reference(ids)
            self.files = self._write_file(aside / kind.file)
            self.bytes = sum(one.stat().st_size for one in self.files)
            tokenizer.save(aside / "tokenizer.json")
            if self.template:
                (aside / "chat_template.jinja").write_text(self.template, encoding="utf-8")
            self._write_record(aside)
            self._compare(aside / kind.file, ids, expected)
            self._write_record(aside)
        return output / kind.file

    def _count(self) -> None:
        """Count what a token is multiplied with: all matrices but tables that only look up."""
        model = self.build.model
        for name, role in matrices_of(model).items():
            if role == "embeddings" and not (name == "embed.weight" and is_tied(model)):
                continue
            rows, columns = model.get_parameter(name).shape
            self.multiplied += rows * columns
            self.multiplied_bytes += self.spec.format_of(name, role).stored_bytes(rows, columns)

    def _ids(self, vocab: int, document: int) -> list[int]:
        """Return the document token and drawn ones, which the file is compared on."""
        draw = torch.Generator().manual_seed(0)
        count = min(COMPARED, self.context) - 1
        return [document, *torch.randint(vocab, (count,), generator=draw).tolist()]

    def _reference(self, ids: list[int]) -> Tensor:
        """Return the logits of the fake-quantized model, token by token [T, V]."""
        model, entries = self.build.model, self.build.prepared.tokenizer.vocab
        assert self.stored is not None
        with faking(model, self.spec, self.stored):
            return decoded(CachedDecoder(model, entries), ids)

    def _write_file(self, file: Path) -> list[Path]:
        """Write the file of the format."""
        model, entries = self.build.model, self.build.prepared.tokenizer.vocab
        assert self.stored is not None
        if self.to == "onnx":
            output = onnx_file.in_few_bits(model, self.spec, self.stored)
            step = CachedDecoder(model, entries, output)
            return onnx_file.write_onnx(step, file, {"headrace.name": self.name})
        output = executorch_file.in_few_bits(model, self.spec, self.stored)
        step = StaticDecoder(CachedDecoder(model, entries, output), self.context)
        executorch_file.write_executorch(step, file)
        return [file]

    def _compare(self, file: Path, ids: list[int], expected: Tensor) -> None:
        """Run the file token by token, and note how far its logits are from the expected ones."""
        runtime = RUNTIMES[file.suffix](file, "", 0)
        rows = [torch.from_numpy(runtime.logits_after(ids[: n + 1])) for n in range(len(ids))]
        apart_T = (torch.stack(rows) - expected).abs().amax(-1)
        self.drift = float(apart_T.max())
        self.equal = float((apart_T <= EQUAL).float().mean())

    def _write_record(self, folder: Path) -> None:
        """Write what the files are."""
        config = self.build.model.config
        record = {
            "format": VERSION,
            "name": self.name,
            "spec": self.spec.model_dump(mode="json"),
            "context": self.context,
            "layers": config.layers,
            "kv_heads": config.resolved_kv_heads,
            "head_dim": config.resolved_head_dim,
            "vocab": self.build.prepared.tokenizer.vocab,
            "multiplied": self.multiplied,
            "multiplied_bytes": self.multiplied_bytes,
            "sha256": {one.name: sha256_of(one) for one in self.files},
            "tokenizer": self.build.prepared.tokenizer.fingerprint,
            "drift": self.drift,
            "equal": self.equal,
            "origin": None if self.origin is None else _plain(self.origin),
            "headrace": __version__,
        }
        write_json(folder / RECORD, record)


def _plain(origin: Origin) -> Mapping[str, Any]:
    return {**origin._asdict(), "fingerprint": dict(origin.fingerprint)}

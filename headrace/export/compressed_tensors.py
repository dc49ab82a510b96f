"""Write a quantized folder that vLLM and `transformers` read: the format compressed-tensors.

The folder is that of `export --to hf`, with the matrices of blocks in codes and a table
`quantization_config` in config.json (https://github.com/vllm-project/compressed-tensors). Weights
alone in few bits are packed into int32 (`pack-quantized`); weights of 8 bits beside activations of
8 bits are int8 (`int-quantized`). The codes are those of the one spec, moved to the names and the
rows of the other side.

With weights alone in few bits logits are those of the fake-quantized model. Activations of 8 bits
are rounded by the runtime: `transformers` and vLLM round the largest number of a token each in its
own way, so logits differ by as much as that rounding moves them. Embedding and output matrix are
stored whole, as vLLM multiplies them: of a point of `headrace compress` as the numbers that their
codes stand for.

Shapes: R rows of a matrix, C columns, G groups of a row.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from headrace.assemble.sockets import Build
from headrace.compress.codes import Codes
from headrace.compress.quantized_model import Stored, faking, formats_of, quantize_model
from headrace.compress.sensitivity import logits_on
from headrace.compress.spec import BITS, PRESETS, WHOLE, NumberFormat, QuantizationSpec
from headrace.core.command import rerun_with
from headrace.core.errors import ConfigError, UnsupportedError, nearest
from headrace.core.files import shell
from headrace.core.remedy import Remedy
from headrace.export.hf import export_hf
from headrace.export.run import refuse_parts
from headrace.model.adapter import WeightLink
from headrace.model.companions import Companions
from headrace.model.hf_config import architecture
from headrace.model.lora import merged_state
from headrace.optim.roles import role_of

METHOD = "compressed-tensors"
CHOICES = ("int8", "int8-dynamic", "int4")
"""What `--quantize` takes, the default of `--to vllm` first."""
COMPARED = 16
"""Tokens on which the folder is compared with the fake-quantized model."""
READS = ("transformers", "compressed_tensors", "accelerate")
"""Packages that open the folder here."""
INSTALL = "pip install 'headrace[hf,vllm]'"


def matrices_only(preset: str) -> QuantizationSpec:
    """Return a preset whose embedding and output matrix stay whole, as vLLM has them.

    Raises:
        ConfigError: the format has no such preset.
    """
    if preset not in CHOICES:
        near = nearest(preset, CHOICES)
        raise ConfigError(
            f"--quantize {preset} is none of compressed-tensors', which are {', '.join(CHOICES)}",
            rerun_with("--quantize", near if near in CHOICES else CHOICES[0], verb="export"),
        )
    return PRESETS[preset].model_copy(update={"embeddings": WHOLE, "head": WHOLE})


def pack_int32(codes_RC: Tensor, bits: int) -> Tensor:
    """Return codes of 4 or 8 bits in whole words, int32 [R, ceil(C x bits / 32)].

    A code is stored with half of its range added; the first stands in the lowest bits.

    Args:
        codes_RC: int8.
        bits: of a code.
    """
    each = 32 // bits
    wide_RC = codes_RC.to(torch.int64) + (1 << (bits - 1))
    wide_RC = torch.nn.functional.pad(wide_RC, (0, -codes_RC.size(1) % each))
    places = torch.arange(each) * bits
    words_RW = (wide_RC.unflatten(1, (-1, each)) << places).sum(-1)
    return torch.where(words_RW >= 1 << 31, words_RW - (1 << 32), words_RW).to(torch.int32)


@dataclass(frozen=True)
class PackedExport:
    """Hold what is written.

    Args:
        build: the model with its whole weights; those that a point has quantized have no values.
        spec: how its matrices are stored.
        stored: these.
    """

    build: Build
    spec: QuantizationSpec
    stored: Stored

    @staticmethod
    def of_run(build: Build, preset: str) -> "PackedExport":
        """Return the export of a plain model, whose matrices are rounded to the nearest codes."""
        spec = matrices_only(preset)
        formats_of(build.model, spec, lambda group: Remedy(text="--quantize int8"))
        return PackedExport(build, spec, quantize_model(build.model, spec))

    @property
    def _reads_codes(self) -> bool:
        return self.spec.activations != "none"

    def check(self, run: Path) -> None:
        """Refuse a model that the format cannot say.

        Args:
            run: the folder that error messages name.

        Raises:
            UnsupportedError: names what it lacks.
        """
        refuse_parts(self.build, "hf", run)
        anew = f"headrace export RUN --to vllm --quantize {CHOICES[0]}, of the run itself"
        if architecture(self.build.config).conv1d:
            raise UnsupportedError(
                "GPT-2 stores its matrices as Conv1D, of which compressed-tensors knows nothing",
                f"headrace export {shell(run)} --to onnx",
            )
        if self.spec.activations == "int8_asymmetric":
            raise UnsupportedError(
                f"vLLM multiplies no {self.spec.name}, whose activations have zero points", anew
            )
        for name, one in self.stored.items():
            role, kind = self._format(name)
            if not isinstance(one, Codes) or not kind.symmetric:
                raise UnsupportedError(
                    f"compressed-tensors stores no {kind.dtype} as {name} has it", anew
                )
            if role != "matrices" and self._reads_codes:
                raise UnsupportedError(
                    f"{name} is multiplied in 8 bits by {self.spec.name}, and vLLM multiplies it "
                    "whole",
                    f"headrace export RUN --to vllm --quantize {self.spec.name}, of the run itself",
                )

    def _format(self, name: str) -> tuple[str, NumberFormat]:
        role = role_of(name, 2)
        return role, self.spec.format_of(name, role)

    def state(self) -> dict[str, Tensor]:
        """Return every parameter whole: of one that is quantized the numbers of its codes."""
        whole = {
            name: one.dequantize() for name, one in self.stored.items() if isinstance(one, Codes)
        }
        return {
            name: whole.get(name, value) for name, value in merged_state(self.build.model).items()
        }

    def tensors(self, link: WeightLink) -> dict[str, Tensor] | None:
        """Return what the files hold of a matrix by their names; None of what is stored whole."""
        one = self.stored.get(link.ours)
        role, kind = self._format(link.ours)
        if role != "matrices" or not isinstance(one, Codes):
            return None
        made: dict[str, Tensor] = {}
        scales = link.to_theirs(one.scales_RG)
        for name, codes_RC in link.to_theirs(one.codes_RC).items():
            base = name.removesuffix(".weight")
            made[f"{base}.weight_scale"] = scales[name]
            if self._reads_codes:
                made[name] = codes_RC
                continue
            made[f"{base}.weight_packed"] = pack_int32(codes_RC, BITS[kind.dtype])
            made[f"{base}.weight_shape"] = torch.tensor(codes_RC.shape)
        return made

    def config(self, links: list[WeightLink]) -> dict[str, Any]:
        """Return the table `quantization_config` of config.json."""
        groups: dict[NumberFormat, list[str]] = {}
        whole = []
        for link in links:
            names = [name for name in link.theirs if link.ours.endswith(".weight")]
            if self.tensors(link) is not None:
                kind = self._format(link.ours)[1]
                plain = kind.model_copy(update={"rounding": "nearest", "scales": "fp32"})
                groups.setdefault(plain, []).extend(_module(name) for name in names)
            elif len(link.shape) > 1:
                whole += [_module(name) for name in names]
        alone = len(groups) == 1
        tables = {
            f"group_{number}": {
                "targets": ["Linear"] if alone else names,
                "weights": _weights(kind),
                "input_activations": TOKENS if self._reads_codes else None,
                "output_activations": None,
            }
            for number, (kind, names) in enumerate(groups.items())
        }
        return {
            "quant_method": METHOD,
            "format": "int-quantized" if self._reads_codes else "pack-quantized",
            "quantization_status": "compressed",
            "config_groups": tables,
            "ignore": ["lm_head", *(name for name in whole if name != "lm_head")],
        }

    def write(
        self,
        output: Path,
        run: Path,
        *,
        sequence_length: int,
        companions: Companions = Companions(),  # noqa: B008  (it is frozen)
    ) -> float | None:
        """Write the folder; return the largest difference of a logit to the fake-quantized model.

        `transformers` opens the folder for that; None where it or compressed-tensors is not
        installed.

        Args:
            output: the new folder.
            run: the folder that error messages name.
            sequence_length: tokens of a sequence in training; the exported config states it.
            companions: files that came with the weights that training began with.

        Raises:
            ConfigError: the folder has files already.
            UnsupportedError: the format cannot say what this model computes.
        """
        self.check(run)
        export_hf(
            self.state(),
            self.build.config,
            self.build.prepared.directory / "tokenizer.json",
            output,
            sequence_length=sequence_length,
            position=self.build.model.position.config_fields(),
            companions=companions,
            packed=self,
        )
        if not all(find_spec(name) for name in READS):
            return None
        return self._distance(output)

    @torch.no_grad()
    def _distance(self, folder: Path) -> float:
        """Return the largest difference of a logit between the folder and the model."""
        entries = self.build.prepared.tokenizer.vocab
        draw = torch.Generator().manual_seed(0)
        ids_BT = torch.randint(entries, (1, COMPARED), generator=draw)
        with faking(self.build.model, self.spec, self.stored):
            ours = logits_on(self.build.model, ids_BT.to(self.build.device)).cpu()
        transformers: Any = import_module("transformers")
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        theirs = model(ids_BT).logits
        return float((theirs - ours)[..., :entries].abs().max())


TOKENS: Mapping[str, Any] = {
    "num_bits": 8,
    "type": "int",
    "symmetric": True,
    "strategy": "token",
    "dynamic": True,
}
"""Activations of 8 bits, with a scale for each token that is made of its own range."""


def _weights(kind: NumberFormat) -> dict[str, Any]:
    """Return how weights are stored, as the format says it."""
    grouped = {"strategy": "group", "group_size": kind.group} if kind.group else {}
    return {
        "num_bits": BITS[kind.dtype],
        "type": "int",
        "symmetric": True,
        "dynamic": False,
        **(grouped or {"strategy": "channel"}),
    }


def _module(name: str) -> str:
    """Return the name of the module of a tensor."""
    return name.removesuffix(".weight")

"""Attention through FlashAttention 3 or 4, put in place of torch's own flash kernels.

torch's flash kernels are FlashAttention 2, written for Ampere: on Hopper they leave the
asynchronous matrix units and the tensor memory accelerator idle. FlashAttention 3 overlaps both
with the softmax; 4 does so for Blackwell too. Neither comes with torch. Where one is installed,
torch's own call registers it under the operations of its flash backend, forward and backward, so
that the model, its memory and compiled code stay as they are. The registration belongs to the
process: a run makes it on one line and restores what stood before when it ends; a forward pass
outside of a run makes it too.

Like every flash kernel here it has the causal flag and no other mask. Left out: fp8, whose backward
pass does not exist. Source: arXiv 2407.08608; torch.nn.attention.activate_flash_attention_impl.

Shapes: B rows, T tokens, H query heads, G key-value heads, K features of a head.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
    sdpa_kernel,
)

from headrace.core.errors import UnsupportedError
from headrace.core.ledger import Ledger
from headrace.core.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)
from headrace.model.attention import Sdpa
from headrace.model.mask import MaskSpec, Rows
from headrace.sockets import Build

WIDEST_HEAD = 256
"""Features of a head that its kernels take (flash-attention's hopper/flash_api.cpp)."""
TORCHS_OWN = "pytorch_flash::"
"""The namespace of torch's own flash kernels, which are FlashAttention 2."""
MASKED = "--with varlen_attention or --with flex_attention in its place"


@dataclass(frozen=True)
class Release:
    """What one version of FlashAttention needs."""

    majors: tuple[int, ...]
    """of the compute capability, as torch's registration checks it"""
    gpus: str
    module: str
    """what torch imports for it"""
    install: str


RELEASES = {
    "FA3": Release(
        (9,), "Hopper", "flash_attn_interface",
        "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
        "python setup.py install",
    ),
    "FA4": Release(
        (9, 10), "Hopper or Blackwell", "flash_attn.cute.interface",
        "pip install --pre flash-attn-4",
    ),
}  # fmt: skip


def is_installed(module: str) -> bool:
    """Whether a module could be imported, by looking at files: nothing of it is run."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or not inner:
        return spec is not None
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, *inner).with_suffix(".py").is_file() for folder in folders)


def activate(version: str) -> None:
    """Put `version` in place of torch's flash kernels, if it does not stand there.

    Raises:
        UnsupportedError: it is installed and cannot be loaded, with its own words.
    """
    if current_flash_attention_impl() == version:
        return
    try:
        activate_flash_attention_impl(version)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(
            f"{version} is installed and cannot be loaded beside torch {torch.__version__}: "
            f"{error}",
            f"{RELEASES[version].install} (or --without flash_attention_3)",
        ) from error


@contextmanager
def activated(version: str) -> Iterator[None]:
    """`version` in place of torch's flash kernels, and afterwards what stood there before."""
    before = current_flash_attention_impl()
    activate(version)
    try:
        yield
    finally:
        if before is None:
            restore_flash_attention_impl()
        else:
            activate(before)


class Flash3Sdpa(Sdpa):
    """The trunk's backend with an activated FlashAttention as the only kernel allowed."""

    def __init__(self, version: str) -> None:
        self.version = version

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> None:
        """See that the kernels stand; the causal flag says everything else.

        Raises:
            UnsupportedError: the mask says more, or the kernels cannot be loaded.
        """
        if not spec.is_plain_causal:
            raise UnsupportedError(f"the flash kernel has no mask for {spec}", MASKED)
        activate(self.version)

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Attention, or an error where flash has no kernel: never another one."""
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            return super().__call__(q_BTHK, k_BTGK, v_BTGK, mask)


class FlashAttention3(Technique[Build]):
    """Attention through FlashAttention 3 or 4, put in place of torch's own flash kernels."""

    version: Literal["FA3", "FA4"] = "FA3"
    """FlashAttention 3, for Hopper; or 4, for Hopper and Blackwell, a pre-release."""

    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    symptoms: ClassVar[tuple[str, ...]] = ("kernel efficiency:attention",)
    card: ClassVar[Card] = Card(
        buys="1.5 to 2 times FlashAttention 2's rate on H100, up to 740 TFLOP/s in fp16 "
        "(arXiv 2407.08608)",
        costs="a package that torch does not bring; half precision and plain causal rows only",
        helps="long rows on Hopper, where attention takes a visible share of the step",
        hurts="packed documents and windows, which it refuses; a GPU where cudnn_attention, which "
        "needs no package, is as fast",
        source="arXiv 2407.08608; torch.nn.attention.activate_flash_attention_impl",
    )

    def supports(self, context: Context) -> Supported | Unsupported:
        """A GPU that the version is written for, half precision, plain causal, and the package."""
        needs = RELEASES[self.version]
        if context.device != "cuda":
            reason = f"{self.version} needs an NVIDIA GPU, not {context.device}"
            return Unsupported(reason, "device=cuda")
        if (context.capability or (0, 0))[0] not in needs.majors:
            found = ".".join(map(str, context.capability or ("unknown",)))
            return Unsupported(
                f"{self.version} is written for {needs.gpus}, and {context.device_name} has "
                f"compute capability {found}",
                "--with flash_attention or --with cudnn_attention in its place",
            )
        if context.precision == "fp32":
            return Unsupported("its kernels take half precision only", "model.precision=bf16")
        width = context.plan.model.resolved_head_dim
        if width > WIDEST_HEAD:
            return Unsupported(
                f"its kernels take heads of at most {WIDEST_HEAD} features, and these have {width}",
                f"model.head_dim={WIDEST_HEAD}",
            )
        for name, other in context.plan.techniques.items():
            if "mask" in other.composes:
                reason = f"{name} needs a dense mask, which flash has no kernel for"
                return Unsupported(reason, MASKED)
        if self.version not in list_flash_attention_impls():
            return Unsupported(f"this torch cannot activate {self.version}", "pip install -U torch")
        if not is_installed(needs.module):
            return Unsupported(f"{self.version} ({needs.module}) is not installed", needs.install)
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """The same memory and work."""
        return ledger

    def apply(self, build: Build) -> None:
        """Fill the backend, and have the kernels stand while a run goes."""
        build.parts.attend = Flash3Sdpa(self.version)
        build.runtime.append(lambda: activated(self.version))

    def active(self, build: Build) -> Evidence:
        """The kernels that the model's own backend launches: flash, and not torch's own."""
        attend, config = build.model.attend, build.config
        dtype = torch.float16 if build.context.precision == "fp16" else torch.bfloat16
        like = torch.zeros(1, 128, 1, config.resolved_head_dim, device=build.device, dtype=dtype)
        q = like.expand(-1, -1, config.heads, -1).contiguous()
        k = like.expand(-1, -1, config.resolved_kv_heads, -1).contiguous()
        with activated(self.version):
            attend(q, k, k, None)  # it may compile
            with torch.profiler.profile(acc_events=True) as profile:
                attend(q, k, k, None)
                torch.cuda.synchronize()
        events = [e for e in profile.key_averages() if str(e.device_type).endswith("CUDA")]
        flash = [e.key for e in events if "flash" in e.key.lower()]
        used = [n for n in flash if TORCHS_OWN not in n]
        return Evidence(
            active=bool(used) and used == flash and isinstance(attend, Flash3Sdpa),
            detail=f"launched {', '.join((used or flash)[:3]) or 'no flash kernel'}",
        )

"""Compute attention through FlashAttention 3 or 4 in the place of torch's flash kernels.

torch's flash kernels are FlashAttention 2, written for Ampere: on Hopper they leave the
asynchronous matrix units and the tensor memory accelerator idle. FlashAttention 3 overlaps both
with the softmax; 4 does so for Blackwell too. Neither comes with torch. Where one is installed,
torch's own call registers it under the operations of its flash backend, forward and backward, so
that the model, its memory and compiled code stay as they are. The registration belongs to the
process: a run makes it on one line and restores what stood before when it ends; a forward pass
outside of a run makes it too.

FlashAttention 3 takes long to compile. With `source = "kernels"` the Hugging Face package of that
name fetches it compiled, from its community's repository, and its function is called in place of
torch's. What is fetched is code that runs here: only a plan that says so does it, and `revision`
pins it to a commit.

Like every flash kernel here it has the causal flag and no other mask. Left out: fp8, whose backward
pass does not exist. Source: arXiv 2407.08608; torch.nn.attention.activate_flash_attention_impl;
huggingface.co/kernels-community/flash-attn3.

Shapes: B rows, T tokens, H query heads, G key-value heads, K features of a head.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from importlib import import_module
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar, Literal, get_args, get_type_hints

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import (
    SDPBackend,
    activate_flash_attention_impl,
    current_flash_attention_impl,
    list_flash_attention_impls,
    restore_flash_attention_impl,
)

from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind, UnsupportedError
from headrace.core.remedy import Remedy, mend
from headrace.costs.ledger import Ledger
from headrace.model.attention import OneKernelSdpa, Sdpa, equal_scores, in_ring, kernels_of
from headrace.model.backend_needs import check_plain, lacks
from headrace.model.mask import MaskSpec, Rows
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

TORCHS_OWN = "pytorch_flash::"
"""The namespace of torch's own flash kernels, which are FlashAttention 2."""
HEAD_MULTIPLE = 8
"""Number that must divide a head's features (the same file); torch's own call pads, the package's
does not."""
RESULTS = 2
"""Number of results that torch's call takes from the package's: the output and its softmax's
sums."""
REPOSITORY, REPOSITORY_VERSION = "kernels-community/flash-attn3", 1
FETCHER, FETCHER_INSTALL = "kernels", "pip install kernels"


@dataclass(frozen=True)
class Release:
    """A version of FlashAttention needs this package; `backend_needs` has its GPUs."""

    module: str
    """What torch imports for it."""
    install: str


RELEASES = {
    "FA3": Release(
        "flash_attn_interface",
        "git clone https://github.com/Dao-AILab/flash-attention && cd flash-attention/hopper && "
        "python setup.py install",
    ),
    "FA4": Release(
        "flash_attn.cute.interface",
        # Later ones return more than torch takes, and need what later ones of these two lack.
        "pip install flash-attn-4==4.0.0b12 nvidia-cutlass-dsl==4.5.3 quack-kernels==0.4.1",
    ),
}


def is_installed(module: str) -> bool:
    """Return whether a module could be imported, by its files: nothing of it is run."""
    package, *inner = module.split(".")
    spec = find_spec(package)
    if spec is None or not inner:
        return spec is not None and spec.origin is not None  # a bare folder has none
    folders = spec.submodule_search_locations or ()
    return any(Path(folder, *inner).with_suffix(".py").is_file() for folder in folders)


def has_fetcher() -> bool:
    """Return whether the fetcher's package is installed; a file or folder of its name is not."""
    try:
        distribution(FETCHER)
    except PackageNotFoundError:
        return False
    return True


def activate(version: str) -> None:
    """Put `version` in place of torch's flash kernels, if it does not stand there.

    Raises:
        UnsupportedError: it is installed and cannot be loaded, with its own words.
    """
    if current_flash_attention_impl() == version:
        return
    try:
        if version == "FA4":
            check_results(import_module(RELEASES[version].module))
        activate_flash_attention_impl(version)
    except (ImportError, OSError, RuntimeError, AttributeError) as error:
        raise UnsupportedError(
            f"{version} is installed and cannot be loaded beside torch {torch.__version__}: "
            f"{error}",
            Remedy(text=RELEASES[version].install).otherwise(mend("-flash_attention_3")),
        ) from error


def check_results(module: ModuleType) -> None:
    """Raise ImportError where FlashAttention 4's forward pass says it returns something else."""
    try:
        hint = get_type_hints(module._flash_attn_fwd).get("return")
    except (NameError, TypeError):  # it says nothing that could be read
        return
    if (count := len(get_args(hint)) or RESULTS) != RESULTS:
        raise ImportError(f"its forward pass returns {count} results, and torch takes {RESULTS}")


@contextmanager
def activated(version: str) -> Iterator[None]:
    """Put `version` in place of torch's flash kernels, and what stood there back afterwards."""
    before = current_flash_attention_impl()
    activate(version)
    try:
        yield
    finally:
        if before is None:
            restore_flash_attention_impl()
        else:
            activate(before)


def fetch(revision: str) -> Callable[..., Any]:
    """Fetch FlashAttention 3's function, of the repository's commit or its latest compatible one.

    Raises:
        UnsupportedError: it cannot be fetched or loaded, with the package's own words.
    """
    kernels: Any = import_module(FETCHER)
    which: dict[str, Any] = {"revision": revision} if revision else {"version": REPOSITORY_VERSION}
    try:
        return kernels.get_kernel(REPOSITORY, **which).flash_attn_func
    except (ImportError, OSError, RuntimeError, ValueError, TypeError, AttributeError) as error:
        raise UnsupportedError(
            f"{REPOSITORY} ({', '.join(f'{k} {v}' for k, v in which.items())}) cannot be loaded "
            f"beside torch {torch.__version__}: {error}",
            Remedy(text=f"{FETCHER_INSTALL} -U").otherwise(mend("-flash_attention_3")),
        ) from error


class FetchedFlash3(Sdpa):
    """A backend that calls a function of FlashAttention 3's own signature."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function = function

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> None:
        """Check that the causal flag says everything, or raise UnsupportedError."""
        check_plain(spec.within(length))

    def __call__(self, q_BTHK: Tensor, k_BTGK: Tensor, v_BTGK: Tensor, mask: object) -> Tensor:
        """Compute attention; one query over a longer key sequence sees all of it."""
        K = q_BTHK.size(-1)
        # Autocast does not know this operation; values come out of a product, in its precision.
        q, k, v = (x.to(v_BTGK.dtype) for x in (q_BTHK, k_BTGK, v_BTGK))
        if K % HEAD_MULTIPLE:  # zeros add nothing to a score
            q, k, v = (F.pad(x, (0, -K % HEAD_MULTIPLE)) for x in (q, k, v))
        out = self.function(q, k, v, softmax_scale=K**-0.5, causal=q.size(1) > 1)
        out = out[0] if isinstance(out, tuple) else out  # older versions add statistics
        return out[..., :K]


class Flash3Sdpa(OneKernelSdpa):
    """A backend that allows an activated FlashAttention and no other kernel."""

    kernel: ClassVar[SDPBackend] = SDPBackend.FLASH_ATTENTION

    def __init__(self, version: str) -> None:
        self.version = version

    def prepare(self, spec: MaskSpec, rows: Rows, length: int) -> None:
        """Activate the kernels; the causal flag says everything else.

        Raises:
            UnsupportedError: the mask says more, or the kernels cannot be loaded.
        """
        check_plain(spec.within(length))
        activate(self.version)


class FlashAttention3(Technique[Build]):
    """Compute attention through FlashAttention 3 or 4 in the place of torch's flash kernels."""

    version: Literal["FA3", "FA4"] | None = None
    """FlashAttention 3, for Hopper; or 4, for Hopper and Blackwell, a pre-release. Left open: the
    one that is installed, and 3 of both."""
    source: Literal["torch", "kernels"] = "torch"
    """An installed package through torch's own call; or fetched by Hugging Face's `kernels`."""
    revision: str = ""
    """The commit that `kernels` fetches; without it the newest compatible one."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "attention"
    stage: ClassVar[Stage] = Stage.PARTS
    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    blocks: ClassVar[str] = "flash"
    symptoms: ClassVar[tuple[str, ...]] = ("kernel efficiency:attention",)
    card: ClassVar[Card] = Card(
        buys=(
            "the paper has 1.5 to 2 times FlashAttention 2's rate in attention alone on H100, "
            "up to 740 TFLOP/s in fp16 (arXiv 2407.08608)"
        ),
        costs=(
            "a package that torch does not bring",
            "half precision and plain causal rows only",
        ),
        helps="long rows on Hopper, where attention takes a visible share of the step",
        hurts="packed documents and windows, which it refuses; a GPU where cudnn_attention, which "
        "needs no package, is as fast",
        source="arXiv 2407.08608; torch.nn.attention.activate_flash_attention_impl",
    )

    @property
    def release(self) -> str:
        """Return the version that is asked for, or that is installed."""
        here = (v for v, r in RELEASES.items() if self.source == "torch" and is_installed(r.module))
        return self.version or next(here, "FA3")

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support GPUs of the version, in half precision, with a causal mask and its package."""
        if context.has_ring and self.source == "kernels":
            return Unsupported(
                "the ring of mesh.context calls torch's operation for flash, and source = "
                "'kernels' brings a function of its own",
                mend("techniques.flash_attention_3.source=torch") | context.whole("context"),
                RefusalKind.COMBINATION,
            )
        return lacks(context, self.release) or self._is_here(context)

    def _is_here(self, context: Context) -> Supported | Unsupported:
        """Return whether the package with the kernels is installed; nothing is imported."""
        needs = RELEASES[self.release]
        if self.source == "kernels":
            if self.release != "FA3":
                return Unsupported(
                    f"{REPOSITORY} holds FlashAttention 3, and version = {self.release!r}",
                    mend("techniques.flash_attention_3.version=FA3"),
                )
            if not has_fetcher():
                return Unsupported(
                    f"the package {FETCHER} is not installed", FETCHER_INSTALL, RefusalKind.PACKAGE
                )
            return Supported()
        if self.release not in list_flash_attention_impls():
            return Unsupported(
                f"this torch cannot activate {self.release}",
                "pip install -U torch",
                RefusalKind.VERSION,
            )
        if not is_installed(needs.module):
            remedy = Remedy(text=needs.install)
            if self.release == "FA3":
                source = "techniques.flash_attention_3.source=kernels"
                fetched = mend(source, text=f"{FETCHER_INSTALL}, with {source}")
                more = Remedy(text=f"{RELEASES['FA4'].install};")
                remedy = remedy.otherwise(more if context.has_ring else more | fetched)
            return Unsupported(
                f"{self.release} ({needs.module}) is not installed", remedy, RefusalKind.PACKAGE
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Keep memory and work, and price attention by the version's kernels."""
        return ledger.attended("flash4" if self.release == "FA4" else "flash3")

    def apply(self, build: Build) -> None:
        """Fill the backend, and have the kernels stand while a run goes."""
        if self.source == "kernels":
            build.parts.attend = FetchedFlash3(fetch(self.revision))
            return
        build.parts.attend = Flash3Sdpa(self.release)
        build.runtime.append(lambda: activated(self.release))

    def active(self, build: Build) -> Evidence:
        """Read which kernels the model's own backend launches: flash, and not torch's own."""
        attend = build.model.attend
        if (seen := in_ring(attend, self.release)) is not None:
            return seen
        dtype = torch.float16 if build.context.precision == "fp16" else torch.bfloat16
        q, k = equal_scores(build.config, build.device, dtype)
        with activated(self.release) if self.source == "torch" else nullcontext():
            kernels = kernels_of(attend, q, k, k, only="CUDA")
        flash = [n for n in kernels if "flash" in n.lower()]
        used = [n for n in flash if TORCHS_OWN not in n]
        return Evidence(
            active=bool(used) and used == flash and isinstance(attend, Flash3Sdpa | FetchedFlash3),
            detail=f"launched {', '.join((used or flash)[:3]) or 'no flash kernel'}",
        )

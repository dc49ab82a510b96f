"""Name changes of a plan: the variants that `limits.py` measures at each shape."""

from dataclasses import dataclass
from pathlib import Path

from headrace.cli.catalogue import catalogue
from headrace.plan.changes import Changes, parse
from headrace.plan.plan import Plan

KERNELS = "+fused_rms_norm +fused_rope "
FLASH4 = "-cudnn_attention +flash_attention_3 techniques.flash_attention_3.version=FA4 "
ONCE4 = "batch.tokens=16384 batch.micro_sequences=4"
KEEPS = "techniques.selective_checkpoint."
CHUNKS = (
    "-fused_cross_entropy +chunked_cross_entropy techniques.chunked_cross_entropy.chunk_tokens="
)
LONG = (
    f"-torch_compile +full_checkpoint {CHUNKS}4096 +chunked_mlp "
    "techniques.chunked_mlp.chunk_tokens=32768"
)
VARIANTS = {
    "mfu": {
        "none_rows2": "batch.micro_sequences=2",
        "none_once4": ONCE4,
        "selective2_rows2": f"+selective_checkpoint {KEEPS}every_matmul=2 batch.micro_sequences=2",
        "budget_rows4": "+memory_budget techniques.memory_budget.fraction=0.4 "
        "batch.micro_sequences=4",
        "selective_half": f"+selective_checkpoint {KEEPS}every=2 batch.micro_sequences=2",
        "kernels_half": f"{KERNELS}+selective_checkpoint {KEEPS}every=2 batch.micro_sequences=2",
        "kernels_once4": f"{KERNELS}+selective_checkpoint {ONCE4}",
        "kernels_once5": f"{KERNELS}+selective_checkpoint batch.tokens=20480 "
        "batch.micro_sequences=5",
        "grown_once5": f"{KERNELS}+selective_checkpoint +expandable_segments batch.tokens=20480 "
        "batch.micro_sequences=5",
        "flash4_once4": f"{KERNELS}{FLASH4}+selective_checkpoint {ONCE4}",
        "attention_rows8": f"+selective_checkpoint {KEEPS}save=attention batch.micro_sequences=8",
        "full_rows4": "+full_checkpoint batch.micro_sequences=4",
        "full_rows8": "+full_checkpoint batch.micro_sequences=8",
    },
    "context": {
        "long": f"{LONG} +bf16_parameters",
        "long_offload": f"{LONG} +bf16_parameters +activation_offload",
        "long_fp32": f"{LONG} -bf16_parameters",
    },
    "start": {"recipe": "", "compile_cache": "+compile_cache"},
    "memory": {
        "recipe": "",
        "chunked": f"{CHUNKS}8192",
        "selective_chunked": f"+selective_checkpoint {CHUNKS}8192",
        "selective2_chunked": f"+selective_checkpoint {KEEPS}every_matmul=2 {CHUNKS}8192",
        "rows4": "batch.micro_sequences=4",
        "rows4_selective": "batch.micro_sequences=4 +selective_checkpoint",
        "rows4_chunked": f"batch.micro_sequences=4 {CHUNKS}8192",
        "exact_chunked": f"-bf16_parameters {CHUNKS}8192",
        "exact_selective_chunked": f"-bf16_parameters +selective_checkpoint {CHUNKS}8192",
        "exact_rows4_selective_chunked": "-bf16_parameters batch.micro_sequences=4 "
        f"+selective_checkpoint {CHUNKS}8192",
        "full_chunked": f"+full_checkpoint {CHUNKS}8192",
        "exact_rows2": f"-bf16_parameters {KERNELS}batch.micro_sequences=2",
        "exact_rows2_chunked": f"-bf16_parameters {KERNELS}batch.micro_sequences=2 {CHUNKS}4096",
        "exact_rows2_flash4": f"-bf16_parameters {KERNELS}{FLASH4}batch.micro_sequences=2 "
        f"{CHUNKS}4096",
    },
}
"""measurement -> name -> changes of the plan"""


@dataclass(frozen=True)
class Variant(Changes):
    """Hold changes of a plan under a name."""

    name: str = ""

    @staticmethod
    def parse(text: str, known: dict[str, str]) -> "Variant":
        """Read a variant by its known name, or from `NAME: changes`."""
        name, colon, changes = text.partition(":")
        if not colon and name not in known:
            raise SystemExit(f"no variant {name!r}; there are {', '.join(known)}, or 'NAME: ...'")
        parsed = parse((changes if colon else known[name]).split())
        return Variant(parsed.with_, parsed.without, parsed.overrides, name)

    def of(self, path: Path, more: list[str]) -> Plan:
        """Return the plan of a file with the changes, and `more` over them."""
        return self.plan(path.read_text(), catalogue(), more)

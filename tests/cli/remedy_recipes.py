"""Recipes, measured files and folders in few bits that are asked for wrongly."""

from collections.abc import Callable
from pathlib import Path

from remedy_compress import small
from remedy_gguf import file
from shell import Case, run


def point(*words: str) -> Callable[[Path], None]:
    """Return what writes a quantized model by these words."""

    def make(_: Path) -> None:
        assert run(["compress", "demo", *words, "--output", "small", "--tokens", "64"]).code == 0

    return make


def taken(_: Path) -> None:
    """Make the folder that a recipe would make."""
    Path("runs/demo/edge").mkdir(parents=True)


EDGE = "compress demo --recipe edge --until distil"
ITSELF = {"RUN": "demo"}
RECIPES = {
    "cli/run_file:_check_words#1": Case("run x.gguf --measure --prompt x"),
    "cli/run_file:_check_words#2": Case("run x.gguf --of demo"),
    "cli/compress:_refuse#1": Case(f"{EDGE} --to int8"),
    "cli/compress:_refuse_alone#1": Case("compress demo --to int9 --until prune"),
    "cli/chain:recipe_of#1": Case("compress demo --recipe egde --until distil"),
    "cli/chain:recipe_of#2": Case("compress demo --recipe edge --until distl"),
    "cli/chain:Chain._check_hop#1": Case("compress demo --recipe edge --until convert"),
    "cli/chain:Chain._check_places#1": Case(EDGE, taken),
    "cli/chain:Chain._check_student#1": Case(EDGE),
    "export/measured:_source_of#1": Case(
        "run a.gguf --measure", lambda _: file("a.gguf"), fills=ITSELF
    ),
    "export/compressed_tensors:matrices_only#1": Case("export demo --to vllm --quantize int9"),
    "export/compressed_tensors:PackedExport.check#2": Case(
        "export small/8da4w --to vllm", point("--to", "8da4w", "--group", "16"), fills=ITSELF
    ),
    "export/compressed_tensors:PackedExport.check#3": Case(
        "export small/nf4 --to hf", point("--to", "nf4"), fills=ITSELF
    ),
    "export/compressed_tensors:PackedExport.check#4": Case(
        "export small/int8-dynamic --to vllm", point("--to", "int8-dynamic"), fills=ITSELF
    ),
    "cli/export:_codes_of#1 packed": Case("export small/int8 --to vllm --quantize int4", small),
}
"""Each error by its site."""

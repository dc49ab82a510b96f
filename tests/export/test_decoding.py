"""What binds decoding with an exported file: what a token reads, multiplies, and the rest."""

import json
from pathlib import Path

import pytest
from tiny_gguf import model, write
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.data.tokenizer import train_tokenizer
from headrace.export.decoding import Decoding, HostRates, examine_file, measure_host
from headrace.export.edge_runtime import EdgeRuntime, Executorch, OnnxRuntime
from headrace.export.executorch_file import check_identifier
from headrace.export.llama_cpp import TokenWork

WORK = TokenWork(weight_bytes=900, cache_bytes=100, multiplied=250)


@pytest.mark.parametrize(
    ("rates", "bottleneck", "share", "ending", "quantized", "remedy"),
    [
        (
            (1250, 5e3),
            "memory bandwidth",
            0.8,
            ".onnx",
            "fp32",
            "export a --to onnx --quantize int8",
        ),
        ((1250, 5e3), "memory bandwidth", 0.8, ".pte", "8da4w", "prune a --by 30%"),
        (
            (1250, 5e3),
            "memory bandwidth",
            0.8,
            ".gguf",
            "f16",
            "export a --to gguf --quantize q4_0",
        ),
        ((5e3, 625), "computation", 0.8, ".gguf", "q4_0", "prune a --by 30%"),
        ((5e3, 2500), "launch", 0.8, ".onnx", "int8", "export a --to executorch"),
        ((5e3, 2500), "launch", 0.8, ".pte", "8da4w", "prune a --by 30% --only layers"),
    ],
)
def test_the_larger_share_binds_or_neither(
    rates: tuple[float, float],
    bottleneck: str,
    share: float,
    ending: str,
    quantized: str,
    remedy: str,
) -> None:
    file = Path(f"model{ending}")
    found = Decoding(file, "runtime", 1.0, WORK, HostRates(*rates), "a", quantized)
    assert found.bottleneck == bottleneck and found.share == pytest.approx(share)
    assert found.remedy == f"headrace {remedy}"
    assert f"{share:.0%}" in found.sentence
    assert found.to_dict()["first"] == {"command": found.remedy}


@pytest.mark.parametrize(("kind", "seen"), [(OnnxRuntime, 10), (Executorch, 64)])
def test_a_token_reads_its_matrices_and_the_cache(kind: type[EdgeRuntime], seen: int) -> None:
    """A program with buffers of a fixed size reads all of them."""
    runtime = kind.__new__(kind)
    runtime.record = {"context": 64, "layers": 3, "kv_heads": 2, "head_dim": 8}
    runtime.record |= {"multiplied": 7, "multiplied_bytes": 5}
    assert runtime.work(10) == TokenWork(5, 2 * 3 * 2 * 8 * 4 * seen, 7)


def test_a_file_of_llama_cpp_is_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("xllamacpp")
    monkeypatch.chdir(tmp_path)
    own = train_tokenizer(["the mill " * 50], vocab=270, pattern="gpt4")
    ours = model({"kv_heads": 2})
    write(ours, own, Path("a.gguf"), "q8_0")
    found = examine_file(Path("a.gguf"))
    matrices = {n: p for n, p in ours.named_parameters() if p.ndim > 1 and "embed" not in n}
    rows = sum(p.numel() for n, p in matrices.items() if n != "head.weight") + own.vocab * 64
    vectors = sum(p.numel() for p in ours.parameters() if p.ndim == 1)
    assert found.work.multiplied == rows + vectors
    assert found.work.weight_bytes == rows * 34 // 32 + 4 * vectors
    assert found.work.cache_bytes == 8 * 2 * 2 * 16 * 32 and found.quantized == "q8_0"
    assert found.token_s > 0 and found.run == "toy"
    told = json.loads(CliRunner().invoke(app, ["doctor", "a.gguf", "--json"]).stdout)
    assert told[0]["remedies"] and told[0]["tokens_per_s"] > 0
    said = CliRunner().invoke(app, ["doctor", "a.gguf"]).stdout
    assert "binds decoding" in said and "try: headrace" in said


def test_rates_of_this_machine_are_numbers() -> None:
    small = measure_host(1)
    assert small.bytes_per_s > 0 and small.flops_per_s > 0


def test_a_program_begins_as_one(tmp_path: Path) -> None:
    """ExecuTorch itself ends the process where other bytes stand there that are no text."""
    (file := tmp_path / "model.pte").write_bytes(b"\0\0\0\0ET12eh00")
    check_identifier(file)
    for content in (b"", b"PK", b"\0\0\0\0XX12", b"\0\0\0\0\xbe\xff12"):
        file.write_bytes(content)
        with pytest.raises(ValueError, match="a program has ET12"):
            check_identifier(file)

"""What ranks are foreseen to send is what they send, by operation and to the byte."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
from cases import (
    BEFORE,
    CHUNKED,
    CP,
    EVEN,
    EXPERTS,
    FLOAT8,
    FSDP,
    INTERLEAVED,
    NARROW,
    PP,
    SAC,
    TP,
    ZBV,
    ZERO2,
    case,
)
from composition import Composition

from headrace.data.ingest import prepare

FUNCTIONS = Path(__file__).with_name("traffic.py")
HALF: dict[str, Any] = {"keys": {"model": {"precision": "bf16"}}}
TIED_HALF: dict[str, Any] = {"model": {"precision": "bf16", "tied_embeddings": True}}
FULL: dict[str, Any] = {"full_checkpoint": {}}
LORA: dict[str, Any] = {"lora": {"rank": 2}}
DORA: dict[str, Any] = {"dora": {"rank": 2}}
QLORA: dict[str, Any] = {"qlora": {"rank": 2, "base": "int8"}}
GPT2: dict[str, Any] = {
    "keys": {
        "model": {
            "norm": "layer_norm",
            "bias": True,
            "activation": "gelu",
            "position": "learned",
        }
    }
}
NORMED: dict[str, Any] = {"keys": {"model": {"qk_norm": True}}}
READS: dict[str, Any] = {"embedding_residual": {}, "value_embeddings": {"tables": 2}}
WHOLE: dict[str, Any] = {"tensor_parallel": {"sequence": False}}


# What is slow here has each of its techniques and its keys in a quick one beside another.
def even(name: str, *techniques: dict[str, Any], **more: Any) -> Composition:
    """A composition whose sizes divide, so that nothing is padded."""
    return case(name, *techniques, **{"shape": "even", "length": 16, **more})


TWO = [
    even("replicas", data=2),
    even("overlapped", {"data_parallel": {}}, data=2, slow=True),
    even("overlapped-halves", {"data_parallel": {"reduce": "bf16"}}, data=2, **HALF),
    even("overlapped-narrow", {"data_parallel": {}}, NARROW, data=2, micro_rows=4, **HALF),
    even("overlapped-lora", {"data_parallel": {}}, LORA, data=2, slow=True),
    even("fsdp", FSDP, data=2, slow=True),
    even("fsdp-kept", {"fsdp": {"reshard": False}}, data=2),
    even("fsdp-half", {"fsdp": {"gather": "bf16"}}, data=2, **HALF, slow=True),
    even("fsdp-halves", {"fsdp": {"gather": "bf16", "reduce": "bf16"}}, data=2, **HALF),
    even("fsdp-narrow", FSDP, NARROW, data=2, **HALF),
    even("fsdp-narrow-one-micro", FSDP, NARROW, data=2, micro_rows=4, **HALF),
    even("zero-narrow-tied", {"zero": {}}, NARROW, data=2, keys=TIED_HALF),
    even("fsdp-fp8", {**FLOAT8, "fsdp": {"gather": "fp8"}}, data=2, **HALF),
    even("fsdp-narrow-fp8", NARROW, {**FLOAT8, "fsdp": {"gather": "fp8"}}, data=2, **HALF),
    even("zero-fp8", {**FLOAT8, "zero": {"gather": "fp8"}}, data=2, slow=True),
    even("fsdp-one-micro", FSDP, data=2, micro_rows=4),
    even("fsdp-lora", FSDP, LORA, data=2),
    even("zero", {"zero": {}}, data=2),
    even("zero-2", {"zero": {"zero_stage": 2}}, data=2),
    even("fsdp-gpt2", FSDP, data=2, **GPT2, slow=True),
    even("fsdp-normed", FSDP, data=2, **NORMED, slow=True),
    even("replicas-lora", LORA, data=2, slow=True),
    even("replicas-narrow", NARROW, data=2, **HALF, slow=True),
    even("tp", TP, tensor=2, slow=True),
    even("tp-half", TP, tensor=2, **HALF, slow=True),
    even("tp-whole-tokens", WHOLE, tensor=2),
    even("tp-narrow", TP, NARROW, tensor=2, **HALF),
    even("tp-gpt2", TP, tensor=2, **GPT2),
    even("tp-normed", TP, tensor=2, **NORMED),
    even("tp-whole-gpt2", WHOLE, tensor=2, **GPT2, slow=True),
    even("tp-whole-normed", WHOLE, tensor=2, **NORMED, slow=True),
    even("tp-lora", TP, LORA, tensor=2),
    even("tp-lora-gpt2", TP, LORA, tensor=2, slow=True, **GPT2),
    even("tp-whole-lora", WHOLE, LORA, tensor=2, slow=True),
    even("tp-lora-outputs", TP, {"lora": {"rank": 2, "targets": ("mlp.gate_up",)}}, tensor=2),
    even("tp-lora-inputs", TP, {"lora": {"rank": 2, "targets": ("mixer.out",)}}, tensor=2),
    even("tp-lora-tables", TP, {"lora": {"rank": 2, "train_also": ("head",)}}, tensor=2),
    even("tp-lora-normed", TP, LORA, tensor=2, slow=True, **NORMED),
    even("tp-dora", TP, DORA, tensor=2),
    even("tp-dora-full", TP, DORA, FULL, tensor=2),
    even("tp-dora-selective", TP, DORA, SAC, tensor=2),
    even("tp-whole-dora", WHOLE, DORA, tensor=2, slow=True),
    even("tp-dora-pieces", TP, DORA, {"chunked_mlp": {"chunk_tokens": 16}}, tensor=2),
    even("tp-qlora", TP, QLORA, tensor=2, slow=True),
    even("tp-pieces", TP, {"chunked_mlp": {"chunk_tokens": 16}}, tensor=2),
    even("tp-chunked", TP, CHUNKED, tensor=2),
    even("tp-full", TP, FULL, tensor=2),
    even("tp-selective", TP, SAC, tensor=2),
    even("cp", CP, context=2),
    even("cp-before", BEFORE, CP, context=2),
    even("cp-half", CP, context=2, **HALF, slow=True),
    even("cp-full", CP, FULL, context=2, slow=True),
    even("cp-selective", CP, SAC, context=2, slow=True),
    even("ulysses-2", {"ulysses": {}}, context=2),
    even("mixture-cp", EXPERTS, CP, context=2),
    even("mixture-cp-full", EXPERTS, CP, FULL, context=2),
    even("mixture-cp-selective", EXPERTS, CP, SAC, context=2, slow=True),
    even("mixture-ulysses", EXPERTS, {"ulysses": {}}, context=2, slow=True),
    even("experts-cp", EVEN, CP, context=2, expert=2),
    even("pp", PP, pipeline=2, slow=True),
    even("pp-speedrun", PP, READS, pipeline=2, layers=4),
    even("zbv-speedrun-half", ZBV, READS, pipeline=2, layers=5, **HALF),
    even("pp-half", PP, pipeline=2, **HALF, slow=True),
    even("pp-interleaved", INTERLEAVED, pipeline=2, layers=4),
    even("zbv", ZBV, pipeline=2, layers=4, keys={"model": {"tied_embeddings": True}}),
    even("pp-tied", PP, pipeline=2, keys={"model": {"tied_embeddings": True}}),
]
FOUR = [
    even("replicas-4", data=4, slow=True),
    even("experts", EVEN, data=4, expert=2),
    even("experts-fsdp", EVEN, FSDP, data=4, expert=2, micro_rows=1),
    even("experts-all-fsdp", EVEN, FSDP, data=4, expert=4, slow=True),
    even("experts-cp-fsdp", EVEN, CP, FSDP, context=2, data=2, expert=2, slow=True),
    even("experts-ulysses", EVEN, {"ulysses": {}}, context=2, data=2, expert=4, slow=True),
    even("experts-hybrid", EVEN, FSDP, data=4, replicate=2, expert=2, slow=True),
    even("fsdp-4", FSDP, data=4, slow=True),
    even("hybrid", FSDP, data=4, replicate=2),
    even("hybrid-zero-2", ZERO2, data=4, replicate=2, micro_rows=1, slow=True),
    even("hybrid-narrow", {"fsdp": {"gather": "bf16"}}, NARROW, data=4, replicate=2, **HALF),
    even("hybrid-lora", FSDP, LORA, data=4, replicate=2, slow=True),
    even("zbv-4", ZBV, pipeline=4, layers=8, slow=True),
    even("cp-4", CP, context=4, slow=True),
    even("ulysses", {"ulysses": {}}, context=2, data=2, slow=True),
    even("tp-fsdp", TP, FSDP, tensor=2, data=2, slow=True),
    even("tp-fsdp-lora", TP, FSDP, LORA, tensor=2, data=2, slow=True),
    even("tp-replicas-lora", TP, LORA, tensor=2, data=2, slow=True),
    even(
        "pp-lora-tp",
        PP,
        TP,
        {"lora": {"rank": 2, "targets": ("mlp.down",)}},
        pipeline=2,
        tensor=2,
        layers=4,
        slow=True,
    ),
    even("pp-tp-dora", PP, TP, DORA, pipeline=2, tensor=2, layers=4, slow=True),
    even("tp-cp", TP, CP, tensor=2, context=2, slow=True),
    even("pp-fsdp", PP, FSDP, pipeline=2, data=2, layers=4, slow=True),
    even("pp-tp", PP, TP, pipeline=2, tensor=2, layers=4, slow=True),
    even("cp-pp-speedrun", PP, CP, READS, pipeline=2, context=2, layers=4, slow=True),
    even("pp-4", PP, pipeline=4, layers=4, slow=True),
]


EXCHANGE = "all_to_all"


@pytest.fixture(scope="module")
def told(
    request: pytest.FixtureRequest,
    zygote: Any,
    corpus: Path,
    prepared_folder: Path,
    tmp_path_factory: pytest.TempPathFactory,
) -> dict[str, list[dict[str, Any]]]:
    """Return what every rank wrote, by case, of those that were collected."""
    found = {}
    asked = {
        item.callspec.params.get("name")
        for item in request.session.items
        if isinstance(item, pytest.Function) and hasattr(item, "callspec")
    }
    for ranks, every in ((2, TWO), (4, FOUR)):
        cases = [one for one in every if one.name in asked]
        if not cases:
            continue
        folder = tmp_path_factory.mktemp("traffic")
        for one in cases:
            prepare(one.plan())
        zygote.call(
            ranks,
            folder,
            FUNCTIONS,
            "count",
            corpus=str(corpus),
            prepared=str(prepared_folder),
            folder=str(folder),
            cases=[asdict(one) for one in cases],
        )
        for one in cases:
            files = [folder / f"{one.name}-{rank}.json" for rank in range(ranks)]
            found[one.name] = [json.loads(file.read_text()) for file in files]
    return found


@pytest.mark.parametrize(
    "name",
    [pytest.param(one.name, marks=[pytest.mark.slow] * one.slow) for one in (*TWO, *FOUR)],
)
def test_what_is_sent_is_foreseen(told: dict[str, list[dict[str, Any]]], name: str) -> None:
    own = [said["sent"].get(EXCHANGE, 0.0) for said in told[name]]
    for rank, said in enumerate(told[name]):
        if name.startswith("experts"):  # each rank sends back what came: they send so much together
            assert len(set(own)) > 1, own
            said["sent"][EXCHANGE] = sum(own) / len(own)
        assert said["sent"], (rank, said)
        assert said["foreseen"].keys() == said["sent"].keys(), (rank, said)
        for operation, bytes in said["sent"].items():
            assert said["foreseen"][operation] == pytest.approx(bytes, rel=1e-9), (rank, said)
            calls = said["foreseen_calls"][operation]
            assert calls == pytest.approx(said["calls"][operation]), (rank, said)

"""The compositions that must run, by the words of the design."""

from typing import Any

from composition import Composition

FSDP: dict[str, Any] = {"fsdp": {}}
TP: dict[str, Any] = {"tensor_parallel": {}}
PP: dict[str, Any] = {"pipeline_parallel": {}}
CP: dict[str, Any] = {"context_parallel": {}}
COMPILE: dict[str, Any] = {"torch_compile": {"backend": "aot_eager", "scope": "block"}}
SAC: dict[str, Any] = {"selective_checkpoint": {}}
CHUNKED: dict[str, Any] = {"chunked_cross_entropy": {"chunk_tokens": 7}}


def case(name: str, *techniques: dict[str, Any], **more: Any) -> Composition:
    """A composition from tables of techniques; `data` and the like are its mesh."""
    mesh = {a: more.pop(a) for a in ("data", "tensor", "context", "pipeline") if a in more}
    tables = {n: k for table in techniques for n, k in table.items()}
    return Composition(name, mesh, tables, **more)


COMPOSITIONS = [
    case("replicas", data=4),
    case("fsdp", FSDP, data=4),
    case("fsdp-gpt2", FSDP, data=4, shape="gpt2", micro_rows=1),
    case("fsdp-tied-no-reshard", {"fsdp": {"reshard": False}}, data=4, shape="tied"),
    case("fsdp-everything", FSDP, SAC, COMPILE, CHUNKED, data=4, packing=True, micro_rows=1),
    case("fsdp-muon", FSDP, {"muon": {}}, data=4, tolerance=1e-4),
]

"""What each rank of the tensor-parallel test does: split builds beside a whole one."""

import time
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from math import prod
from typing import Any

import torch
from house import (
    CATALOGUE,
    Result,
    assert_equal,
    make_plan,
    make_rows,
    put_data_in,
    take_step,
)

from headrace.assemble.build import make_build
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.costs.work import Attention, Matmul, Work
from headrace.data.ingest import prepare
from headrace.kernels.quantized_weight import QuantizedWeight
from headrace.model.lora import plain
from headrace.parallel.world import World, open_world
from headrace.plan.plan import Plan
from headrace.train.evaluate import evaluate

SHAPES: Mapping[str, Mapping[str, Any]] = {
    "grouped": {"dim": 24, "heads": 8, "head_dim": 6, "kv_heads": 4, "ffn": 20, "vocab": 307},
    "tied": {
        "dim": 32,
        "heads": 4,
        "kv_heads": 4,
        "ffn": 20,
        "vocab": 311,
        "tied_embeddings": True,
        "qk_norm": True,
        "position": "none",
        "activation": "relu2",
    },
    "gpt2": {
        "dim": 40,
        "heads": 4,
        "ffn": 28,
        "vocab": 313,
        "norm": "layer_norm",
        "bias": True,
        "activation": "gelu",
        "position": "learned",
    },
    "biased": {
        "dim": 24,
        "heads": 4,
        "ffn": 12,
        "vocab": 309,
        "bias": True,
        "qk_norm": True,
        "layers": 3,
    },
}
"""Decoders that divide over two and four ranks and differ in everything else."""
STEPS = 3
LAYERS = 3
"""Blocks that share a graph: each alone would have one."""
EVAL_TOKENS = 128
DEVICE = torch.device("cpu")


@contextmanager
def worlds(ranks: int, corpus: str, prepared: str) -> Iterator[World]:
    """Open this rank's place, with `ranks` tensor ranks."""
    torch.set_num_threads(1)
    put_data_in(corpus, prepared)
    with open_world(split_plan("grouped", ranks).mesh, DEVICE) as world:
        yield world


def split_plan(
    shape: str,
    ranks: int,
    sequence: bool = True,
    others: Mapping[str, Any] | None = None,
    **keys: Any,
) -> Plan:
    """A tiny plan over `ranks` tensor ranks; one rank is the plain baseline with the same keys."""
    knobs = {**(others or {}), **({"tensor_parallel": {"sequence": sequence}} if ranks > 1 else {})}
    techniques = {n: CATALOGUE.find(n).model_validate(k) for n, k in knobs.items()}
    model = {"layers": 2, "vocab_multiple": 1, "init_std": 0.2, "precision": "fp32"}
    model |= {**SHAPES[shape], **keys.pop("model", {})}
    plan = make_plan(eval={"tokens": EVAL_TOKENS}, **keys)
    return plan.replaced(model=model, techniques=techniques, mesh={"tensor": ranks})


def build_in(world: World, plan: Plan) -> Build:
    """Return a build with every parameter off its starting value, equal in every layout."""
    build = make_build(plan, prepare(plan), world, DEVICE)
    with torch.no_grad():
        for name, parameter in build.model.named_parameters():
            if isinstance(parameter, QuantizedWeight):
                continue
            draw = torch.Generator().manual_seed(zlib.crc32(name.encode()))
            noise = torch.randn(tuple(build.layouts[name].shape), generator=draw)
            parameter.add_(0.1 * build.part(name, noise))
    return build


def whole(build: Build, result: Result) -> Result:
    """Return the result with every gradient put together from the ranks' parts."""
    return Result(result.loss, {n: build.whole(n, g) for n, g in result.gradients.items()})


def equals(ranks: int, corpus: str, prepared: str, cases: list[Mapping[str, Any]]) -> None:
    """Compare losses and gradients of a step, weights after three, validation, and evidence."""
    with worlds(ranks, corpus, prepared) as world:
        for case in cases:
            try:
                _equal(world, ranks, **case)
            except Exception as error:
                error.add_note(str(case))
                raise


def _equal(
    world: World,
    ranks: int,
    shape: str,
    sequence: bool = True,
    ignored: bool = True,
    states: bool = False,
    others: Mapping[str, Any] | None = None,
    beside: Mapping[str, Any] | None = None,
    **keys: Any,
) -> None:
    """Split against whole.

    Args:
        world: of the split build.
        ranks: of it.
        shape: of the decoder.
        sequence: the knob.
        ignored: whether some targets are.
        states: whether weights and gradients of a rank have the bytes that are predicted.
        others: techniques of the split build.
        beside: techniques of both, those that change what is computed.
        keys: of both plans.
    """
    beside = beside or {}
    alone = build_in(World(), split_plan(shape, 1, others=beside, **keys))
    both = {**beside, **(others or {})}
    split = build_in(world, split_plan(shape, ranks, sequence, others=both, **keys))
    for index in range(STEPS):
        rows = make_rows(300, ignored=ignored, seed=index)
        right = take_step(alone, rows, index=index)
        found = whole(split, take_step(split, rows, index=index))
        if index == 0:
            assert_equal(found, right)
        assert abs(found.loss - right.loss) < 1e-5 * right.loss, (index, found.loss, right.loss)
    for name, parameter in alone.model.named_parameters():
        wanted, mine = plain(parameter), plain(split.model.get_parameter(name))
        off = float((split.whole(name, mine) - wanted).abs().max() / wanted.abs().max())
        assert off < 1e-5, (name, off)
    _same_everywhere(split)
    check_active(split)
    if states:
        parameters = dict(split.model.named_parameters()).values()
        lines = split.predicted(split.plan).memory
        held = sum(p.nbytes for p in parameters)
        row = 4 * split.config.dim  # of embedding and head, whose entries may not divide
        assert abs(held - lines["parameters"].bytes) < row + 1, (held, lines["parameters"].bytes)
        gradients = [p.grad for p in parameters if p.grad is not None]
        assert abs(sum(g.nbytes for g in gradients) - lines["gradients"].bytes) < 1
    a, b = evaluate(alone), evaluate(split)
    assert a.tokens == b.tokens and abs(a.loss_nats - b.loss_nats) < 1e-5, (a, b)


def _same_everywhere(build: Build) -> None:
    """What no axis cuts is bit for bit equal on all ranks."""
    for name, parameter in build.model.named_parameters():
        if not build.layouts[name].split:
            mine = plain(parameter).flatten().tolist()
            assert all(other == mine for other in build.world.gather(mine)), name


def graphs(ranks: int, corpus: str, prepared: str, sequence: bool) -> None:
    """Blocks that are compiled one by one share a graph, whatever wraps their parts."""
    others = {"torch_compile": {"backend": "aot_eager", "scope": "block"}}
    with worlds(ranks, corpus, prepared) as world:
        plan = split_plan("biased", ranks, sequence, others=others, model={"layers": LAYERS})
        build = build_in(world, plan)
        take_step(build, make_rows(300, ignored=True))
        found = check_active(build)["torch_compile"].numbers
        assert found == {"graphs": 2, "graph_breaks": 0}, found  # a block's and the loss's


def memory(ranks: int, corpus: str, prepared: str, crossed: bool) -> None:
    """What a layer keeps, the peak, parameters and state, of a rank under torch's tracker."""
    import house
    import test_predicts as traced

    with worlds(ranks, corpus, prepared) as world:

        def build_of(plan: Plan) -> Build:
            build = make_build(plan, prepare(plan), world, DEVICE)
            for name, p in build.model.named_parameters():  # no slice keeps the whole
                assert p.untyped_storage().nbytes() == p.nbytes, name
            return build

        patient(traced)
        house.build_of = build_of
        for model, sequence in (("headrace", not crossed), ("gpt2", crossed)):
            technique = CATALOGUE.find("tensor_parallel").model_validate({"sequence": sequence})
            deep, flat = (
                settled(
                    traced.plan_of(layers=n, **traced.TRUNKS[model]).replaced(
                        techniques={"tensor_parallel": technique}, mesh={"tensor": ranks}
                    )
                )
                for n in (traced.DEEP, traced.FLAT)
            )
            measured = deep.kept - flat.kept
            predicted = traced.kept_by_layers(deep.ledger) - traced.kept_by_layers(flat.ledger)
            held = deep.parameters
            said = deep.ledger.memory["parameters"].bytes
            case = (model, sequence, predicted, measured, deep.ledger.peak(), deep.peak)
            assert abs(predicted - measured) < traced.SLOPE_BAND * measured, case
            assert abs(deep.ledger.peak()[1] - deep.peak) < traced.PEAK_BAND * deep.peak, case
            assert abs(said - held) < 0.001 * held, case  # 521 entries are 261 + 260


def beside_ranks(name: str, knobs: Mapping[str, Any], sequence: bool) -> dict[str, Any]:
    """Return a technique with its knobs, and tensor parallelism."""
    asked = {name: knobs, "tensor_parallel": {"sequence": sequence}}
    return {n: CATALOGUE.find(n).model_validate(k) for n, k in asked.items()}


def patient(traced: Any) -> None:
    """Let gloo's threads let go of the last collective's tensors before memory is read."""
    right = traced.Traced._read

    def read(self: Any, *args: Any) -> Any:
        seen = [right(self, *args)]
        while len(seen) < 4 or seen[-1] != seen[-4]:  # nothing was let go of for a while
            time.sleep(0.03)
            seen.append(right(self, *args))
        return seen[-1]

    traced.Traced._read = read


def settled(plan: Plan) -> Any:
    """Trace a plan until its peak is foreseen on all ranks, three times at most; the lowest peak.

    What gloo's threads let go of late in a step only adds to its peak.
    """
    import test_predicts as traced

    traces: list[traced.Traced] = []
    while len(traces) < 3:
        traces.append(traced.Traced(plan))
        lowest = min(traces, key=lambda trace: trace.peak)
        is_off = abs(lowest.ledger.peak()[1] - lowest.peak) >= traced.PEAK_BAND * lowest.peak
        anywhere = torch.tensor(float(is_off))
        torch.distributed.all_reduce(anywhere, torch.distributed.ReduceOp.MAX)
        if not anywhere:
            break
    return lowest


def adapters_memory(
    ranks: int, corpus: str, prepared: str, cases: list[tuple[str, Mapping[str, Any], bool]]
) -> None:
    """What a layer keeps, the peak, parameters and state, of a rank with its part of adapters.

    Args:
        ranks: that share the model.
        corpus: what is read.
        prepared: where it is prepared.
        cases: a technique, its knobs, and whether the stream is cut along the sequence.
    """
    import house
    import test_predicts as traced

    patient(traced)
    sizes = {"dim": 128, "ffn": 512, "vocab": 522}
    with worlds(ranks, corpus, prepared) as world:
        house.build_of = lambda plan: make_build(plan, prepare(plan), world, DEVICE)
        for case in cases:
            _, knobs, _ = case
            techniques = beside_ranks(*case)
            deep, flat = (
                settled(
                    traced.plan_of(layers=n, **sizes).replaced(
                        techniques=techniques, mesh={"tensor": ranks}
                    )
                )
                for n in (traced.DEEP, traced.FLAT)
            )
            kept, lines = deep.kept - flat.kept, deep.ledger.memory
            said = traced.kept_by_layers(deep.ledger) - traced.kept_by_layers(flat.ledger)
            assert abs(said - kept) < traced.SLOPE_BAND * kept, (case, said, kept)
            if "targets" not in knobs:  # whose peak a CPU's backward work sets, which is no line
                peak = deep.ledger.peak()[1]
                assert abs(peak - deep.peak) < traced.PEAK_BAND * deep.peak, (case, peak, deep.peak)
            assert abs(lines["parameters"].bytes - deep.parameters) < 1, (case, deep.parameters)
            states = lines["optimizer"].bytes
            assert abs(states - deep.state) < 0.01 * deep.state, (case, states, deep.state)


def adapters_work(
    ranks: int, corpus: str, prepared: str, cases: list[tuple[str, Mapping[str, Any], bool]]
) -> None:
    """The FLOPs of a rank's matmuls are those of its pieces, none of which has no time."""
    import house
    import test_predicts as traced

    with worlds(ranks, corpus, prepared) as world:
        house.build_of = lambda plan: make_build(plan, prepare(plan), world, DEVICE)
        for case in cases:
            techniques = beside_ranks(*case)
            plan = traced.plan_of(layers=2, dim=128, ffn=256, vocab=522)
            plan = plan.replaced(techniques=techniques, mesh={"tensor": ranks})
            per_token, ledger = traced.counted_flops(plan)
            unknown = {n: p.unknown for n, p in ledger.work.items() if p.unknown}
            assert not unknown, (case, unknown)
            said = sum(map(_flops, ledger.work.values())) / plan.batch.tokens
            # Of DoRA's lengths the matmuls of rank x rank numbers are no pieces.
            band = 1e-3 if "dora" in techniques else 1e-6
            assert abs(said - per_token) < band * per_token, (case, said, per_token)


def _flops(piece: Work) -> float:
    """Return the FLOPs of a piece, of an attention's backward pass those of its mathematics."""
    if isinstance(piece, Matmul):
        return 2.0 * piece.count * prod(piece.sizes)
    if isinstance(piece, Attention):
        rows, heads, _, length, features = piece.sizes
        products = 2 if piece.phase == "forward" else 4
        return 2.0 * products * piece.count * rows * heads * length**2 * features
    return 0.0


def bf16_memory(ranks: int, corpus: str, prepared: str) -> None:
    """The peak of a rank that holds a small part in bf16, and the ends of the model beside it."""
    import house
    import test_predicts as traced

    knobs = {"tensor_parallel": {"sequence": False}, "bf16_parameters": {}}
    techniques = {n: CATALOGUE.find(n).model_validate(k) for n, k in knobs.items()}
    with worlds(ranks, corpus, prepared) as world:
        house.build_of = lambda plan: make_build(plan, prepare(plan), world, DEVICE)
        plan = traced.plan_of(house.Variant("bf16_parameters"), layers=2)
        found = traced.Traced(plan.replaced(techniques=techniques, mesh={"tensor": ranks}))
        said = found.ledger.peak()
        assert abs(said[1] - found.peak) < 0.03 * found.peak, (said, found.peak)


def sees_errors(ranks: int, corpus: str, prepared: str) -> None:
    """Without one collective, one sum of partial gradients or one offset, the comparison fails."""
    from headrace.techniques.parallel import tensor_parallel as module

    sharded = module.ShardedVocabulary
    wrong: Mapping[str, Any] = {
        "copy": lambda x, peers: x,
        "_partial": lambda build, name: None,
        "ShardedVocabulary": lambda offset, *rest: sharded(0, *rest),
    }
    with worlds(ranks, corpus, prepared) as world:
        for name, broken in wrong.items():
            right = getattr(module, name)
            setattr(module, name, broken)
            try:
                _equal(world, ranks, shape="tied", sequence=name == "_partial")
                seen = False
            except AssertionError:
                seen = True
            setattr(module, name, right)
            assert all(world.gather(seen)), f"the comparison did not see a broken {name}"

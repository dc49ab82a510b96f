"""The loss in chunks: where one chunk saves nothing it is refused, and it is no evidence."""

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import cast

import pytest
import torch
from facts import in_order

from headrace.assemble.build import make_ledger
from headrace.assemble.sockets import Build
from headrace.core.errors import UnsupportedError
from headrace.data.loader import Micro
from headrace.kernels.chunked_loss import has_native
from headrace.plan.technique import Supported, Unsupported
from headrace.techniques.loss import chunked_cross_entropy
from headrace.techniques.loss.chunked_cross_entropy import ChunkedCrossEntropy
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON = "techniques.chunked_cross_entropy.chunk_tokens"


@pytest.mark.parametrize("chunk", [128, 2048])
def test_one_chunk_by_autograd_is_refused(make_tiny: Make, chunk: int) -> None:
    """It holds the trunk's logits, and gradients that the trunk has not made yet."""
    with pytest.raises(
        UnsupportedError, match=in_order("chunk_tokens", chunk, "128 tokens")
    ) as caught:
        make_tiny(f"{ON}={chunk}")
    assert (f"{ON}=64",) in caught.value.remedy.changes
    with pytest.raises(UnsupportedError, match=in_order("chunk_tokens", 32, "32 tokens")):
        make_tiny(f"{ON}=32", "batch.micro_sequences=2")


def test_one_chunk_by_kernels_is_not(make_tiny: Make) -> None:
    """Return a loss and write its gradient over the logits, as the kernels do."""
    build = make_tiny(f"{ON}=64")
    gpu = replace(build.context, device="cuda", capability=(9, 0), has_triton=True)
    assert isinstance(ChunkedCrossEntropy().supports(gpu), Supported)
    for by_autograd in (
        (ChunkedCrossEntropy(fused=False), gpu),
        (ChunkedCrossEntropy(), replace(gpu, has_triton=False)),
    ):
        assert isinstance(by_autograd[0].supports(by_autograd[1]), Unsupported)


@pytest.mark.parametrize("chunk", [128, 64])
def test_one_chunk_is_no_evidence(make_tiny: Make, batch: Batch, chunk: int) -> None:
    """Whoever makes micro-batches smaller than the plan says: each is then one chunk."""
    build = make_tiny(f"{ON}=64")
    build.model.head.chunk_tokens = chunk
    step(build, batch(build), 0)
    evidence = ChunkedCrossEntropy(chunk_tokens=chunk).active(build)
    assert evidence.numbers["most_logits_tokens"] == chunk
    assert evidence.active == (chunk == 64)


@pytest.mark.parametrize(
    ("words", "native"),
    [
        ((), True),
        (("techniques.chunked_cross_entropy.native=false",), False),
        (("model.logit_cap=20",), False),
        (("techniques.z_loss.weight=1e-4",), False),
        (("techniques.label_smoothing.smoothing=0.1",), False),
    ],
)
def test_torchs_own_computes_cross_entropy_on_a_cpu_and_nothing_else(
    make_tiny: Make, batch: Batch, words: tuple[str, ...], native: bool
) -> None:
    build = make_tiny(f"{ON}=64", *words)
    step(build, batch(build), 0)
    evidence = build.plan.techniques["chunked_cross_entropy"].active(build)
    assert evidence.active and evidence.numbers["most_logits_tokens"] == 64
    assert (evidence.numbers["native_calls"] > 0) == (native and has_native())
    assert ("torch's own" in evidence.detail) == (native and has_native())


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("techniques.z_loss.weight=1e-4",), "knows nothing of z_loss"),
        (("model.logit_cap=20",), "knows nothing of model.logit_cap = 20"),
        (("model.precision=bf16",), "in bf16 it would return the loss rounded"),
        (("techniques.chunked_cross_entropy.fused=true",), "fused = true"),
    ],
)
def test_torchs_own_is_refused_where_it_would_compute_something_else(
    make_tiny: Make, words: tuple[str, ...], why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "has_native", lambda: True)
    with pytest.raises(UnsupportedError, match=why):
        make_tiny(f"{ON}=64", "techniques.chunked_cross_entropy.native=true", *words)


def test_torchs_own_stands_in_the_kernels_place_on_a_gpu(
    make_tiny: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "has_native", lambda: True)
    build = make_tiny(f"{ON}=64")
    gpu = replace(
        build.context, device="cuda", capability=(9, 0), has_triton=True, precision="fp32"
    )
    for native, by_kernels in ((None, 1.0), (True, 0.0)):
        head = ChunkedCrossEntropy(chunk_tokens=64, native=native)
        assert isinstance(head.supports(gpu), Supported)
        plan = build.plan.replaced(techniques={head.name(): head})
        assert make_ledger(plan, replace(gpu, plan=plan)).sizes["loss_by_kernels"] == by_kernels
    whole = ChunkedCrossEntropy(chunk_tokens=128, native=True).supports(gpu)
    assert isinstance(whole, Unsupported) and "cuts nothing" in whole.reason
    head = ChunkedCrossEntropy(chunk_tokens=64, native=True)
    on = SimpleNamespace(
        context=gpu, device=torch.device("cuda"), notes={}, parts=SimpleNamespace()
    )
    head.apply(cast("Build", on))
    made = on.parts.head(build.config)
    assert made.native and not made.fused, "or it would be no evidence that kernels ran"


def test_a_torch_without_its_own_says_so(
    make_tiny: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(chunked_cross_entropy, "has_native", lambda: False)
    with pytest.raises(UnsupportedError, match=r"has none: 2\.13 has") as caught:
        make_tiny(f"{ON}=64", "techniques.chunked_cross_entropy.native=true")
    assert "techniques.chunked_cross_entropy.native=false" in caught.value.remedy.text
    build = make_tiny(f"{ON}=64")
    step(build, batch(build), 0)
    evidence = build.plan.techniques["chunked_cross_entropy"].active(build)
    assert evidence.active and evidence.numbers["native_calls"] == 0


def test_torchs_own_is_foreseen_to_hold_a_chunk_once(make_tiny: Make) -> None:
    asked = f"{ON}=64", "techniques.chunked_cross_entropy.fused=false"
    build = make_tiny(*asked)
    given = build.plan.techniques["chunked_cross_entropy"]
    heads = [given.model_copy(update={"native": native}) for native in (False, True)]
    plain, own = (
        make_ledger(build.plan.replaced(techniques={head.name(): head}), build.context)
        for head in heads
    )
    vocab = plain.sizes["vocab"]
    assert own.memory["logits"].bytes == 64 * vocab * 4 < plain.memory["logits"].bytes

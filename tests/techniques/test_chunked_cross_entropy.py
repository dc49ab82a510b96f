"""The loss in chunks: where one chunk saves nothing it is refused, and it is no evidence."""

from collections.abc import Callable
from dataclasses import replace

import pytest

from headrace.core.errors import UnsupportedError
from headrace.core.technique import Supported, Unsupported
from headrace.data.loader import Micro
from headrace.sockets import Build
from headrace.techniques.loss.chunked_cross_entropy import ChunkedCrossEntropy
from headrace.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON = "techniques.chunked_cross_entropy.chunk_tokens"


@pytest.mark.parametrize("chunk", [128, 2048])
def test_one_chunk_by_autograd_is_refused(make_tiny: Make, chunk: int) -> None:
    """It holds the trunk's logits, and gradients that the trunk has not made yet."""
    with pytest.raises(UnsupportedError, match="cuts nothing of a micro-batch of 128") as caught:
        make_tiny(f"{ON}={chunk}")
    assert f"{ON}=64" in caught.value.remedy
    with pytest.raises(UnsupportedError, match="cuts nothing of a micro-batch of 32"):
        make_tiny(f"{ON}=32", "batch.micro_sequences=2")


def test_one_chunk_by_kernels_is_not(make_tiny: Make) -> None:
    """They write the gradient over the logits."""
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

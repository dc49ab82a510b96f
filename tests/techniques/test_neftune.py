"""NEFTune's noise has the paper's length, is the same for every layout, and is none elsewhere."""

from collections.abc import Callable

import pytest
import torch

from headrace.assemble.sockets import Build
from headrace.data.loader import Micro
from headrace.model.mask import Rows
from headrace.techniques.adapt.neftune import lengths, noise_of, with_noise
from headrace.train.evaluate import evaluate
from headrace.train.train import step

ALPHA = "techniques.neftune.alpha=5"


def test_the_length_of_a_text_is_that_of_its_document() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    segments = torch.tensor([[0, 0, 0, 1, 1, 2], [0, 1, 1, 1, 1, 1]])
    assert lengths(Rows(positions, segments), 6).tolist() == [
        [3, 3, 3, 2, 2, 1],
        [1, 5, 5, 5, 5, 5],
    ]
    assert lengths(Rows(positions[:1] * 0 + torch.arange(6)), 6).unique().tolist() == [6]


def test_noise_is_uniform_and_has_the_papers_length() -> None:
    """Its mean square is alpha^2 / (3 x L x D), so a text's noise is alpha / sqrt(3) long."""
    length, dim, alpha = 300, 64, 5.0
    words = torch.randint(0, 1 << 30, (2, length), generator=torch.Generator().manual_seed(0))
    noise = noise_of(words | length << 30, dim, alpha)
    bound = alpha / (length * dim) ** 0.5
    assert noise.abs().max() <= bound
    assert noise.norm(dim=(1, 2)).tolist() == pytest.approx([alpha / 3**0.5] * 2, rel=0.02)
    assert abs(noise.mean()) < bound / 100
    counts = torch.histc(noise / bound, 10, -1, 1)
    assert (counts / counts.mean() - 1).abs().max() < 0.1


def test_a_step_has_noise_that_rows_and_micro_batches_do_not_change(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    """Compare two micro-batches with one, with none of it, and with a validation."""
    plain, whole = make_tiny(), make_tiny(ALPHA)
    parts = make_tiny(ALPHA, "batch.micro_sequences=2")
    before = evaluate(plain).loss_nats
    assert evaluate(whole).loss_nats == before
    (work,) = [whole.place(whole, micro) for micro in batch(whole)]
    again = [parts.place(parts, micro).rows.noise_BT for micro in batch(parts)]
    assert work.rows.noise_BT is not None and len(again) > 1
    assert torch.equal(work.rows.noise_BT, torch.cat([n for n in again if n is not None]))
    other = with_noise(work._replace(index_BT=work.index_BT + 1), whole.plan.seed).rows.noise_BT
    assert other is not None and (other != work.rows.noise_BT).all()
    losses = [float(step(one, batch(one), 0)[0]) for one in (plain, whole, parts)]
    assert abs(losses[1] - losses[0]) > 1e-4
    assert losses[2] == pytest.approx(losses[1], rel=1e-6)


def test_evidence_sees_a_model_without_noise(make_tiny: Callable[..., Build]) -> None:
    build = make_tiny(ALPHA)
    (technique,) = build.techniques
    found = technique.active(build)
    assert found.active and found.numbers["length"] == pytest.approx(5 / 3**0.5, rel=0.2)
    del build.model.enter  # the instance's own, over the class's
    assert not technique.active(build).active


def test_it_predicts_more_traffic(make_tiny: Callable[..., Build]) -> None:
    plain, noisy = (make_tiny(*words) for words in ((), (ALPHA,)))
    name = "embedding/forward"
    moved = [one.predicted(one.plan).work[name].bytes for one in (plain, noisy)]  # type: ignore[attr-defined]
    assert moved[1] > moved[0]

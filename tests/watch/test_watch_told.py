"""What a watched loop tells of its numbers: whose loss and norm, which share, which steps."""

import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import headrace
from headrace.watch.batches import loss_in, token_counts
from headrace.watch.norms import gradient_norm

CPU = torch.device("cpu")


class Told(nn.Module):
    """A model that returns its loss, as those of transformers do."""

    def __init__(self, loss: float) -> None:
        super().__init__()
        self.weight, self.told = nn.Parameter(torch.ones(2)), loss

    def forward(self, input_ids: Any = None, **more: Any) -> Any:
        return SimpleNamespace(loss=self.weight.sum() * 0.0 + self.told)


def loop(loader: Any = None, loss: float = 4.0) -> tuple[Told, torch.optim.Optimizer, Any]:
    model = Told(loss)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    return model, optimizer, headrace.watch(model, optimizer, loader)


def test_a_noted_loss_takes_the_place_of_the_models_in_its_own_step() -> None:
    model, optimizer, watched = loop()
    for step in range(2):
        model().loss.backward()
        if step == 1:
            watched.note(loss=1.0)
        optimizer.step()
    first, noted, *_ = (row["loss"] for row in watched.report()["rows"])
    assert (first, noted) == (4.0, 1.0)


def test_the_way_to_the_device_is_a_part_of_the_input() -> None:
    ids = torch.zeros(1, 4, dtype=torch.long)
    model, optimizer, watched = loop([{"input_ids": ids}] * 3)
    for batch in watched.loader:
        time.sleep(0.02)  # from the batch to the forward pass
        model(**batch).loss.backward()
        optimizer.step()
    for row in watched.report()["rows"]:
        assert row["input_s"] >= row["transfer_s"] >= 0.02 and row["step_s"] >= row["input_s"]


def test_tokens_without_a_target_are_counted_by_the_step() -> None:
    ids, labels = torch.zeros(2, 5, dtype=torch.long), torch.full((2, 5), -100)
    labels[0, :3] = 1
    batch = {"input_ids": ids, "labels": labels}
    model, optimizer, watched = loop([batch] * 2)
    for given in watched.loader:
        model(**given).loss.backward()
        optimizer.step()
    assert [row["wasted_tokens"] for row in watched.report()["rows"]] == [7, 7]


def test_clipping_is_a_share_of_the_steps_that_tell_of_it() -> None:
    model, optimizer, watched = loop()
    for step in range(8):
        model().loss.backward()
        if step < 4:
            watched.note(grad_norm=3.0, max_norm=1.0 if step else 5.0)
        optimizer.step()
    assert watched.report()["clip_rate"] == 0.75


def test_a_skip_between_steps_is_no_step() -> None:
    model, optimizer, watched = loop()
    model().loss.backward()
    optimizer.step()
    watched.note(skipped=True)
    report = watched.report()
    assert (report["steps"], report["skipped_steps"]) == (1, 0)


def test_what_another_thread_computes_is_not_this_training() -> None:
    model, optimizer, watched = loop()
    model().loss.backward()
    optimizer.step()
    other = threading.Thread(target=lambda: (model(), optimizer.step()))
    other.start()
    other.join()
    assert watched.report()["steps"] == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.complex64])
def test_a_norm_has_more_digits_than_its_gradients(dtype: torch.dtype) -> None:
    """16 x 257 numbers of length one; bf16 would make 64 of their norm."""
    weight = nn.Parameter(torch.zeros(16 * 257, dtype=dtype))
    weight.grad = torch.full_like(weight, 1j if dtype.is_complex else 1.0)
    norm = gradient_norm(torch.optim.SGD([weight], lr=0.0), CPU)
    assert norm is not None and not norm.is_complex()
    assert norm.item() == pytest.approx(4112**0.5, rel=1e-6)


def test_shares_of_a_steps_loss_are_added_up_and_whole_ones_averaged() -> None:
    """A Trainer gives a micro-batch the count of the step's targets, and it is a share then."""
    for named, right in (({"num_items_in_batch": 8}, 8.0), ({}, 4.0)):
        model, optimizer, watched = loop()
        for _ in range(2):
            model(**named).loss.backward()
        optimizer.step()
        assert [row["loss"] for row in watched.report()["rows"]] == [right]


def test_reading_for_an_evaluation_is_no_wait_of_the_training() -> None:
    model, optimizer, watched = loop([{}] * 3)
    model().loss.backward()
    optimizer.step()
    with torch.no_grad():
        for batch in watched.loader:
            model(**batch)
    model().loss.backward()
    optimizer.step()
    assert [row["wait_s"] for row in watched.report()["rows"]] == [0.0, 0.0]
    assert watched.report()["phase_s"]["input"] == 0.0


@pytest.mark.parametrize(
    "kind", ["tuple", "list", "mapping", "object", "scalar", "inside", "beside", "named"]
)
def test_a_loss_is_found_in_whatever_a_model_returns(kind: str) -> None:
    weight = torch.ones((), requires_grad=True)
    loss, logits = 2.0 * weight, torch.zeros(2, 3)
    output: Any = {
        "tuple": (logits, loss),
        "list": [loss, logits],
        "mapping": {"loss": loss},
        "object": SimpleNamespace(loss=loss),
        "scalar": loss,
        "inside": {"out": {"loss": loss}},
        "beside": (logits, {"loss": loss}),
        "named": {"logits": logits, "lm_loss": loss},
    }[kind]
    assert loss_in(output) is loss
    assert loss_in((logits, torch.zeros(()))) is None and loss_in(logits) is None
    assert loss_in(loss.reshape(1, 1)) is None and loss_in({"a_loss": loss, "b_loss": loss}) is None


def test_ignored_targets_of_a_pair_are_padding() -> None:
    ids = torch.zeros(2, 5, dtype=torch.long)
    targets = ids.clone()
    targets[0, 2:] = -100
    for pair in ((ids, targets), [ids, targets]):
        counts = token_counts(pair)
        assert (counts["tokens"], int(counts["padded"]), int(counts["targets"])) == (10, 3, 7)
    assert token_counts((ids.float(), targets)) == {} and token_counts((ids, targets[:1])) == {}


def test_the_whole_of_several_losses_is_taken_by_its_name_or_not_at_all() -> None:
    weight = torch.ones((), requires_grad=True)
    loss, part = 2.0 * weight, 1.0 * weight

    class Output:
        def __init__(self) -> None:
            self.lm_loss, self.aux_loss = part, part

        @property
        def loss(self) -> torch.Tensor:
            return loss

    for output in (
        {"total_loss": loss, "ce_loss": part},
        {"loss_total": loss},
        {"Loss": loss, "a_loss": part},
        SimpleNamespace(total_loss=loss, lm_loss=part),
        SimpleNamespace(lm_loss=loss),
        Output(),
    ):
        assert loss_in(output) is loss, output
    assert loss_in((part, loss)) is None  # nothing says which of them is trained by
    assert loss_in((loss, part.detach())) is loss


MASKED = torch.arange(5).expand(2, 5) < 3


@pytest.mark.parametrize("names", [("x", "y"), ("inputs", "targets"), ("input_ids", "label")])
def test_targets_are_counted_under_the_names_that_they_have(names: tuple[str, str]) -> None:
    ids = torch.arange(10).reshape(2, 5)
    targets = ids.where(MASKED, -100)
    for batch in (
        dict(zip(names, (ids, targets), strict=True)),
        {"batch": {names[0]: ids, names[1]: targets}},
    ):
        counts = token_counts(batch)
        assert (counts["tokens"], int(counts["targets"])) == (10, 6)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("place", [1, 2])
def test_a_mask_beside_inputs_and_targets_says_what_is_padding(
    dtype: torch.dtype, place: int
) -> None:
    ids = torch.arange(10).reshape(2, 5)
    batch = [ids, ids.where(torch.arange(5).expand(2, 5) < 2, -100)]
    batch.insert(place, MASKED.to(dtype))
    counts = token_counts(tuple(batch))
    assert [int(counts[name]) for name in ("tokens", "padded", "targets")] == [10, 4, 4]
    assert token_counts((ids, torch.zeros_like(ids), ids)) == {}
    flat = token_counts((ids, batch[3 - place].flatten()))
    assert int(flat["targets"]) == 4
    assert token_counts((ids, torch.zeros(2, dtype=torch.long))) == {}  # classes of rows

"""A watch sees a foreign loop and tells of it what a report would, and what was noted."""

import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from watched_loop import ROWS, TOKENS, VOCAB, setup, train

import headrace
from headrace.core.errors import ConfigError
from headrace.doctor.run import diagnose
from headrace.watch.norms import gradient_norm


def test_a_plain_loop_is_told_in_the_names_of_a_report(tmp_path: Path) -> None:
    model, optimizer, loader = setup()
    with headrace.watch(model, optimizer, loader) as watched:
        assert watched.loader is loader
        train(model, optimizer, loader, micros=3)
        assert watched.report()["status"] == "running"
    report = watched.report()
    assert (report["status"], report["steps"], report["measured_steps"]) == ("done", 4, 4)
    assert report["tokens"] == 4 * 3 * ROWS * TOKENS == report["rows"][-1]["tokens"]
    assert report["wasted_token_fraction"] == 5 / 8 and report["padding_fraction"] == 2 / 8
    phases = ("input", "forward", "backward", "optimizer", "eval", "other")
    assert all(report["phase_s"][phase] > 0 for phase in phases)
    assert report["phase_s"]["compile"] == 0
    told_s = sum(row["step_s"] + row.get("eval_s", 0) for row in report["rows"])
    assert sum(report["phase_s"].values()) == pytest.approx(told_s)
    assert told_s < report["wall_s"]
    losses = [row["loss"] for row in report["rows"]]
    assert report["loss"] == {"first": losses[0], "last": losses[-1]}
    assert 1 < losses[0] < 4 and report["nonfinite_steps"] == 0
    assert report["host_lead"] is None and any("lead" in s for s in report["not_measured"])
    watched.note(loss=float("nan"))  # closed: nobody listens
    folder = tmp_path / "new" / "one"  # the end of a run is no time to ask for a folder
    watched.save(folder / "report.json")
    assert json.loads((folder / "report.json").read_text())["steps"] == 4
    assert [path.name for path in folder.iterdir()] == ["report.json"]


def test_a_slow_loader_is_seen_on_the_host_and_in_its_phase() -> None:
    model, optimizer, loader = setup()

    def slowly() -> Iterator[Any]:
        for batch in loader:
            time.sleep(0.004)
            yield batch

    watched = headrace.watch(model, optimizer, slowly())
    train(model, optimizer, watched.loader, epochs=1)
    report = watched.report()
    assert report["input_wait"]["p50_s"] > 0.004 and report["input_wait"]["stalled_steps"] == 6
    assert report["phase_s"]["input"] > 6 * 0.004
    listed = headrace.watch(model, optimizer, list(loader)).loader
    assert len(listed) == 6 and len(list(listed)) == 6


def test_what_is_noted(tmp_path: Path) -> None:
    model = nn.Linear(2, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    watched = headrace.watch(model, optimizer)
    for step in range(4):
        for loss in (1.0, torch.tensor([3.0])):
            model(torch.ones(1, 2)).sum().backward()
            watched.note(loss=loss, tokens=10, targets=5)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        watched.note(grad_norm=norm if step else float("inf"), max_norm=1.0 if step % 2 else 100.0)
        if step == 3:
            watched.note(skipped=True)
        else:
            optimizer.step()
        optimizer.zero_grad()
    report = watched.report()
    assert report["steps"] == 4 and report["tokens"] == 80
    assert report["wasted_token_fraction"] == 0.5 and report["padding_fraction"] is None
    assert report["clip_rate"] == 0.75  # 2 sqrt(3) is over 1 and under 100
    assert report["skipped_steps"] == report["nonfinite_steps"] == 1
    assert [row["loss"] for row in report["rows"]] == [2.0] * 4
    watched.save(tmp_path / "it.json")
    assert json.loads((tmp_path / "it.json").read_text())["rows"][0]["grad_norm"] is None
    with pytest.raises(ConfigError, match="distributed"):
        watched.note(grad_norm=SimpleNamespace(full_tensor=None))
    with pytest.raises(ConfigError, match="SimpleNamespace"):
        headrace.watch(model, SimpleNamespace())
    with pytest.raises(ConfigError, match="optimizer"):
        headrace.watch(model)
    with pytest.raises(ZeroDivisionError), headrace.watch(model, optimizer) as failing:
        _ = 1 / 0
    assert failing.report()["status"] == "failed"


def plain_loop(watched: Any, model: nn.Module, optimizer: Any, *, steps: int, bad: int) -> None:
    """A loop that says nothing, and at step `bad` learns at a rate that is no number."""
    for step in range(steps):
        ids = torch.randint(0, VOCAB, (4, TOKENS))
        optimizer.param_groups[0]["lr"] = float("inf") if step == bad else 0.01
        logits = model(ids)  # no loss that a hook could see
        nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
    watched.close()


def test_a_loop_that_tells_nothing_and_diverges_is_named(tmp_path: Path) -> None:
    """Only its gradients show it: they are read where the update begins."""
    for bad in (30, -1):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(VOCAB, 16), nn.Linear(16, VOCAB))
        optimizer = torch.optim.AdamW(model.parameters())
        watched = headrace.watch(model, optimizer)
        plain_loop(watched, model, optimizer, steps=60, bad=bad)
        report = watched.report()
        assert report["loss"]["last"] is None and "grad_norm" in report["rows"][0]
        assert report["nonfinite_steps"] == (29 if bad > 0 else 0)
        assert not any("gradient norms" in told for told in report["not_measured"])
        watched.save(file := tmp_path / "watched.json")
        found = [finding.bottleneck for finding in diagnose([file])]
        assert (found[0] == "instability") == ("instability" in found) == (bad > 0)


class Odd(torch.Tensor):
    """A gradient of which only its own class knows what it is, as a distributed one."""


def test_the_norm_that_is_read_is_torchs_and_a_noted_one_takes_its_place() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8).double(), nn.Linear(8, 8).bfloat16())
    bag = nn.Embedding(8, 8, sparse=True)
    unused = nn.Parameter(torch.zeros(3))
    for module in model:
        for parameter in module.parameters():
            parameter.grad = torch.randn_like(parameter)
    bag(torch.tensor([1, 1, 2])).square().sum().backward()  # a row that is told twice
    held = [*model.parameters(), bag.weight]
    whole = torch.cat([p.grad.to_dense().flatten().double() for p in held])  # type: ignore[union-attr]
    optimizer = torch.optim.SGD([*held, unused], lr=0.0)
    norm = gradient_norm(optimizer, torch.device("cpu"))
    assert norm is not None and norm.item() == pytest.approx(whole.norm().item(), rel=1e-3)
    optimizer.grad_scale = torch.tensor(4.0)  # type: ignore[attr-defined]
    scaled = gradient_norm(optimizer, torch.device("cpu"))
    assert scaled is not None and scaled.item() == pytest.approx(norm.item() / 4)
    assert gradient_norm(torch.optim.SGD([unused], lr=0.0), torch.device("cpu")) is None
    held[0].grad = torch.zeros(8, 8).as_subclass(Odd)
    assert gradient_norm(optimizer, torch.device("cpu")) is None  # nobody knows

    weight = nn.Linear(2, 1, bias=False)
    optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
    with headrace.watch(weight, optimizer) as watched:
        for step in range(4):
            weight(torch.ones(1, 2)).sum().backward()
            if step > 1:
                watched.note(grad_norm=9.0)
            optimizer.step()
            optimizer.zero_grad()
    read = [row["grad_norm"] for row in watched.report()["rows"]]
    assert read == [pytest.approx(2**0.5), pytest.approx(2**0.5), 9.0, 9.0]


class Coded(Exception):
    """Libraries of the web have errors with such codes."""

    code = None


@pytest.mark.parametrize(
    ("raised", "status"),
    [
        (SystemExit(0), "interrupted"),
        (SystemExit(3), "failed"),
        (GeneratorExit(), "interrupted"),
        (Coded(), "failed"),
    ],
    ids=["exit 0", "exit 3", "closed generator", "another's code"],
)
def test_a_loop_that_ends_itself_has_not_failed(raised: BaseException, status: str) -> None:
    model, optimizer, loader = setup()
    with pytest.raises(type(raised)), headrace.watch(model, optimizer, loader) as watched:
        train(model, optimizer, loader, micros=1)
        raise raised
    assert watched.report()["status"] == status


def test_more_targets_than_tokens_waste_none() -> None:
    model, optimizer, _ = setup()
    with headrace.watch(model, optimizer) as watched:
        for _ in range(4):
            watched.note(tokens=4, targets=9)
            optimizer.step()
    assert watched.report()["wasted_token_fraction"] == 0


def test_parameters_that_have_no_shape_yet_are_not_counted() -> None:
    model = nn.Sequential(nn.Linear(3, 4), nn.LazyLinear(5))
    optimizer = torch.optim.SGD(model[0].parameters(), lr=0.1)
    with headrace.watch(model, optimizer) as watched:
        pass
    assert watched.report()["parameters"] == 3 * 4 + 4


def test_what_is_no_model_is_told() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.01)
    with pytest.raises(ConfigError, match="was given a function") as told:
        headrace.watch(lambda x: x, optimizer)  # type: ignore[arg-type]
    assert told.value.remedy.text == "headrace.watch(model, optimizer, loader)"


def test_what_was_asked_for_and_does_nothing_is_told() -> None:
    """Parameters that no loss depends on; those that are trained later are none of them."""
    model, spare = nn.Linear(4, 1), nn.Parameter(torch.zeros(15))
    optimizer = torch.optim.SGD([*model.parameters(), spare], lr=0.01)
    found = []
    for late in (99, 2):
        optimizer.zero_grad()
        with headrace.watch(model, optimizer, [torch.randn(2, 4)] * 5) as watched:
            for step, batch in enumerate(watched.loader):
                loss = model(batch).square().mean()
                (loss + spare.sum() if step >= late else loss).backward()
                optimizer.step()
                optimizer.zero_grad()
        signals = watched.report()["signals"]
        found.append((signals["untrained_share"], signals["lost_techniques"]))
    assert found == [(0.75, []), (0.0, [])]

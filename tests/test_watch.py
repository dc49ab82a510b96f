"""A watch sees a foreign loop, costs it nothing that counts, and changes no number of it."""

import copy
import json
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

import headrace
from headrace.core.errors import ConfigError
from headrace.doctor.run import diagnose
from headrace.signals import HostClock
from headrace.watch import clock as clocks
from headrace.watch.norms import gradient_norm
from headrace.watch.report import WARMUP_STEPS
from headrace.watch.watched import Watched

VOCAB, TOKENS, ROWS = 11, 8, 2


class Tiny(nn.Module):
    """A language model that returns its loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def rows(count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows whose last two slots are padding, and whose first three are masked out."""
    made = []
    for seed in range(count):
        ids = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(TOKENS, dtype=torch.long)
        mask[-2:] = 0
        labels = ids.clone()
        labels[:3] = labels[-2:] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def setup() -> tuple[Tiny, torch.optim.Optimizer, Any]:
    """A model, its optimizer, and a loader that shuffles."""
    torch.manual_seed(0)
    model = Tiny()
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        DataLoader(rows(), batch_size=ROWS, shuffle=True),  # type: ignore[arg-type]
    )


def train(
    model: nn.Module, optimizer: Any, loader: Any, *, epochs: int = 2, micros: int = 1
) -> None:
    """A plain loop, with an evaluation after each epoch."""
    for _ in range(epochs):
        for index, batch in enumerate(loader, 1):
            model(**batch)["loss"].backward()
            if index % micros == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            model(**batch)


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


@pytest.mark.parametrize("micros", [1, 3])
def test_it_changes_no_bit_and_leaves_nothing_behind(micros: int) -> None:
    found = []
    for watching in (False, True):
        model, optimizer, loader = setup()
        watched = headrace.watch(model, optimizer, loader) if watching else Watched()
        train(model, optimizer, loader, micros=micros)
        watched.close()
        assert type(loader) is DataLoader
        assert not model._forward_hooks and not model._forward_pre_hooks
        assert not optimizer._optimizer_step_pre_hooks and not optimizer._optimizer_step_post_hooks
        train(model, optimizer, loader, epochs=1, micros=micros)
        assert watched.report()["steps"] == (12 // micros if watching else 0)
        found.append([*model.parameters(), torch.rand(1)])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


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


class Late(HostClock):
    """A device more than a step behind its host, or one that has always caught up."""

    made, now, caught_up = 0, 0, False

    def __init__(self) -> None:
        super().__init__()
        Late.made += 1

    def record(self) -> None:
        super().record()
        Late.now += 1
        self.at = Late.now

    def query(self) -> bool:
        return Late.caught_up or Late.now - self.at > 8


@pytest.mark.parametrize("dry", [False, True])
def test_it_never_waits_makes_no_events_and_tells_when_the_device_ran_dry(
    dry: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Late, "caught_up", dry)
    monkeypatch.setattr(clocks.Clock, "_new_moment", lambda self: Late())
    keeps, drain = set(), clocks.Clock.drain
    monkeypatch.setattr(
        clocks.Clock, "drain", lambda self, *, keep: keeps.add(keep) or drain(self, keep=keep)
    )
    model, optimizer, loader = setup()
    watched = headrace.watch(model, optimizer, loader)
    watched._clock.asynchronous = True
    train(model, optimizer, loader)
    made = Late.made
    train(model, optimizer, loader)
    assert Late.made == made and keeps == {None}
    report = watched.report()
    assert report["steps"] - report["measured_steps"] == (0 if dry else 1)
    lead = report["host_lead"]
    warm = report["measured_steps"] - WARMUP_STEPS
    assert lead["steps"] == warm
    assert lead["dry_at_forward_steps"] == lead["dry_before_input_steps"] == (warm if dry else 0)


def test_copies_of_a_watched_model_are_deaf() -> None:
    model, optimizer, loader = setup()
    watched = headrace.watch(model, optimizer, loader)
    twin = copy.deepcopy(model)
    hooks: list[Any] = [*twin._forward_pre_hooks.values(), *twin._forward_hooks.values()]
    assert [hook.run for hook in hooks] == [None, None]  # nor was the loader copied with them
    train(twin, torch.optim.SGD(twin.parameters(), lr=0.1), [next(iter(loader))], epochs=1)
    assert watched.report()["steps"] == 0
    assert {p for p, _ in watched._clock._marks} == {"input", "transfer"}


@pytest.mark.parametrize("how", ["whole", "in place", "inside"])
def test_a_compiled_model_has_no_more_graphs_for_it(how: str) -> None:
    torch._dynamo.reset()
    model, optimizer, loader = setup()
    model.drop.p = 0.0
    called: Any = model
    if how == "in place":
        model.compile(backend="eager", fullgraph=True)
    else:
        called = torch.compile(model, backend="eager", fullgraph=True)
    seen = model if how == "inside" else called
    with headrace.watch(seen, optimizer, loader) as watched:
        for batch in loader:
            batch.pop("attention_mask")
            called(**batch)["loss"].backward()
            optimizer.step()
            optimizer.zero_grad()
    report = watched.report()
    assert report["compiler"]["graphs"] == 1 and report["compiler"]["graph_breaks"] == 0
    assert report["compiler"]["graphs_after_warmup"] == 0
    assert report["rows"][0]["compile_s"] == report["phase_s"]["compile"] > 0
    apart = not any("apart" in sentence for sentence in report["not_measured"])
    assert apart == (how != "inside")
    assert report["phase_s"]["forward"] > 0 and (report["phase_s"]["backward"] > 0) == apart


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


@pytest.mark.parametrize("how", ["plain", "trainer"])
def test_a_burst_of_a_watched_loop(how: str, tmp_path: Path) -> None:
    """Its steps are not steady, its trace lies beside what is saved, and no bit changes."""
    weights = []
    for folder in (None, tmp_path / "traces"):
        model, optimizer, loader = setup()
        watched = headrace.watch(trace=folder)
        if how == "plain":
            watched.attach(model, optimizer, loader)
            train(model, optimizer, loader, epochs=5)  # of 6 steps and an evaluation
        else:
            callback: Any = watched.callback()
            its = {"model": model, "optimizer": optimizer, "train_dataloader": loader}
            callback.on_train_begin(None, None, None, **its)
            train(model, optimizer, loader, epochs=5)
            callback.on_train_end(None, None, None)
        watched.close()
        weights.append([*model.parameters()])
    assert all(torch.equal(a, b) for a, b in zip(*weights, strict=True))
    report = watched.report()
    # The burst that began after step 10 was cut short by the evaluation after step 12.
    assert report["signals"]["traces"]["files"] == ["step-18.rank-0.json.gz"]
    traced = [row["step"] for row in report["rows"] if "traced" in row]
    assert traced == [*range(11, 20)]
    watched.save(tmp_path / "deep.json")
    told = json.loads((tmp_path / "deep.json").read_text())["signals"]["traces"]
    assert told["folder"] == "traces" and told["trouble"] == ""
    assert headrace.watch().report()["signals"]["traces"] is None


@pytest.mark.gpu
@pytest.mark.alone
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("dry", [False, True])
def test_on_a_device_nothing_waits(dry: bool) -> None:
    model = nn.Sequential(*[nn.Linear(4096, 4096) for _ in range(8)]).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    ids = torch.randint(0, VOCAB, (8, TOKENS), device="cuda")
    batch = {"x": torch.randn(8192, 4096, device="cuda"), "input_ids": ids, "labels": ids}
    with headrace.watch(model, optimizer, [batch] * 10) as watched:
        for _epoch in range(2):
            torch.cuda.set_sync_debug_mode("error")
            try:
                for taken in watched.loader:
                    loss = model(taken["x"]).square().mean()
                    loss.backward()
                    watched.note(loss=loss, grad_norm=loss, max_norm=0.0)
                    optimizer.step()
                    optimizer.zero_grad()
                    if dry:
                        torch.cuda.set_sync_debug_mode("default")
                        torch.cuda.synchronize()
                        torch.cuda.set_sync_debug_mode("error")
            finally:
                torch.cuda.set_sync_debug_mode("default")
            torch.cuda.synchronize()
            report = watched.report()
        pool = watched._clock._free
        assert len(pool) <= 10 * 7 + 8  # of one epoch, in which the host may run ahead
    assert report["measured_steps"] == 20 and report["clip_rate"] == 1.0
    assert report["wasted_token_fraction"] == 0.0
    lead = report["host_lead"]
    dry_steps = lead["dry_at_forward_steps"]
    # Where others use the device too, an event that was just recorded may not be through.
    assert lead["steps"] == 17
    assert dry_steps >= 14 if dry else dry_steps <= 3
    memory = report["peak_memory_bytes"]
    assert 0 < memory["allocated"] <= memory["reserved"] < report["signals"]["capacity_bytes"]
    assert report["signals"]["alloc_retries"] == 0
    forward_s, backward_s = (report["phase_s"][p] for p in ("forward", "backward"))
    assert forward_s < backward_s < 4 * forward_s


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_the_norm_of_gradients_of_a_device_is_not_waited_for() -> None:
    """Of two dtypes there, and with a part of them on the host."""
    card = [nn.Linear(64, 64).cuda(), nn.Linear(64, 64).cuda().bfloat16()]
    for host in ([], [nn.Linear(64, 64)]):
        parameters = [p for module in (*card, *host) for p in module.parameters()]
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer = torch.optim.SGD(parameters, lr=0.0)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            norm = gradient_norm(optimizer, torch.device("cuda", 0))
        finally:
            torch.cuda.set_sync_debug_mode("default")
        whole = torch.cat([p.grad.flatten().float().cpu() for p in parameters]).norm()  # type: ignore[union-attr]
        assert norm is not None and norm.is_cuda and norm.item() == pytest.approx(whole.item())


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
    optimizer.grad_scale = torch.tensor(4.0)
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


def test_what_is_no_model_is_told() -> None:
    optimizer = torch.optim.SGD(nn.Linear(4, 1).parameters(), lr=0.01)
    with pytest.raises(ConfigError, match="was given a function") as told:
        headrace.watch(lambda x: x, optimizer)  # type: ignore[arg-type]
    assert told.value.remedy == "headrace.watch(model, optimizer, loader)"


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

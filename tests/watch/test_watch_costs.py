"""A watch costs a loop nothing that counts: no wait, no graph, no bit of it changes."""

import copy
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader
from watched_loop import TOKENS, VOCAB, setup, train

import headrace
from headrace.observe.signals import HostClock
from headrace.watch import clock as clocks
from headrace.watch.norms import gradient_norm
from headrace.watch.report import WARMUP_STEPS
from headrace.watch.watched import Watched


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
    monkeypatch.setattr(clocks.HookClock, "_new_moment", lambda self: Late())
    keeps, drain = set(), clocks.HookClock.drain
    monkeypatch.setattr(
        clocks.HookClock, "drain", lambda self, *, keep: keeps.add(keep) or drain(self, keep=keep)
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


@pytest.mark.parametrize("how", ["plain", "trainer"])
def test_a_profiler_window_of_a_watched_loop(how: str, tmp_path: Path) -> None:
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
    # The window that began after step 10 was cut short by the evaluation after step 12.
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
    """Gradients have two dtypes there, and a part of them is on the host."""
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

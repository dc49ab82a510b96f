"""Adapters in a run: what is frozen, saved, exported, composed and refused."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from facts import in_order

from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.costs.count import baseline_ledger
from headrace.data.loader import Micro
from headrace.model.lora import LoraLinear, adapted_ledger, linears_of
from headrace.plan.technique import Unsupported
from headrace.techniques.adapt.lora import Lora
from headrace.train.checkpoint import Saved
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ALL = ("mixer.qkv", "mixer.out", "mlp.gate_up", "mlp.down")


def weights(build: Build) -> dict[str, torch.Tensor]:
    return {n: p.detach().clone() for n, p in build.model.named_parameters()}


def test_only_adapters_learn_and_the_first_step_starts_at_the_model(
    make_tiny: Make, batch: Batch
) -> None:
    baseline, build = make_tiny(), make_tiny("techniques.lora.rank=2")
    before = weights(build)
    assert all(torch.equal(before[n], p) for n, p in weights(baseline).items())
    adapters = {n: t for n, t in before.items() if n not in weights(baseline)}
    assert len(adapters) == 2 * len(ALL) * build.config.layers
    assert all(bool(t.any()) == n.endswith(".lora_a") for n, t in adapters.items())
    losses = [float(step(b, batch(b), 0)[0]) for b in (baseline, build)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)
    for index in (1, 2):
        step(build, build.loader.step(index).micros, index)
    moved = {n for n, t in weights(build).items() if not torch.equal(t, before[n])}
    assert moved == set(adapters)
    held = [p for named in build.routed.values() for p in named.values()]
    assert sum(p.numel() for p in held) == sum(t.numel() for t in adapters.values())
    numbers = check_active(build)["lora"].numbers
    assert numbers["reached"] == numbers["adapters"] == len(ALL) * build.config.layers


def test_targets_name_linears_by_their_ends(make_tiny: Make) -> None:
    build = make_tiny('techniques.lora.targets=["mixer.qkv", "mlp.down"]')
    found = {n for n, m in build.model.named_modules() if isinstance(m, LoraLinear)}
    assert found == {f"blocks.{i}.{end}" for i in (0, 1) for end in ("mixer.qkv", "mlp.down")}
    assert len(linears_of(build.model, ())) == 2 * len(ALL)
    with pytest.raises(ConfigError, match=r"'mlp\.up'.*mlp\.gate_up") as caught:
        make_tiny('techniques.lora.targets=["mlp.up"]')
    assert "mlp.gate_up" in caught.value.remedy.text
    with pytest.raises(ConfigError, match=r"mixer\.bcx.*mixer\.qkv"):
        baseline = baseline_ledger(build.config, rows=1, length=8, precision="fp32", device="cpu")
        adapted_ledger(baseline, "lora", ["mixer.bcx"], 2, None)


@pytest.mark.parametrize(
    "beside",
    [
        "chunked_cross_entropy.chunk_tokens=7",
        "selective_checkpoint={}",
        "torch_compile.backend=aot_eager",
        "muon={}",
    ],
)
@pytest.mark.parametrize("adapt", ["lora", "qlora"])
def test_stands_beside(make_tiny: Make, batch: Batch, adapt: str, beside: str) -> None:
    """The adapters' gradients stay as they are, whatever else is on."""
    found = []
    for more in ([], [f"techniques.{beside}"]):
        build = make_tiny(f"techniques.{adapt}.rank=2", *more)
        with torch.no_grad():
            for module in build.model.modules():
                if isinstance(module, LoraLinear):
                    module.lora_b.fill_(0.1)
        step(build, batch(build), 0)
        found.append({n: p.grad for n, p in build.model.named_parameters() if p.requires_grad})
        assert check_active(build)[adapt].active
    assert found[0].keys() == found[1].keys()
    for name, right in found[0].items():
        torch.testing.assert_close(found[1][name], right, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("adapt", ["lora", "qlora"])
def test_an_update_that_frees_gradients_leaves_evidence(
    make_tiny: Make, batch: Batch, adapt: str
) -> None:
    build = make_tiny(
        f"techniques.{adapt}.rank=2", "techniques.optimizer_in_backward={}", "optimizer.clip_norm=0"
    )
    before = [m.lora_b for m in build.model.modules() if isinstance(m, LoraLinear)]
    step(build, batch(build), 0)
    assert all(b.grad is None and bool(b.any()) for b in before)
    assert check_active(build)[adapt].numbers["reached"] == len(before)


LINEARS = {
    "alone": [],
    "experts": ["techniques.mixture_of_experts.experts=4"],
    "a gate": ["techniques.linear_attention.rule=sum"],
    "gates": ["techniques.linear_attention.rule=gated_delta"],
    "narrow gates": ["techniques.linear_attention.rule=gated_delta", "techniques.gqa={}"],
    "convolutions": ["techniques.short_convolution.between=1", "techniques.gqa={}"],
}


@pytest.mark.parametrize("beside", LINEARS)
@pytest.mark.parametrize("adapt", ["lora={rank = 2}", "qlora={rank = 2, base = 'int8'}"])
def test_every_linear_has_its_adapter_in_the_prediction(
    make_tiny: Make, states: Callable[[Build], Any], adapt: str, beside: str
) -> None:
    """Experts have no adapter, nor has their router, of which only the weight is read."""
    held, predicted = states(make_tiny(f"techniques.{adapt}", *LINEARS[beside]))
    assert predicted == held


def test_lora_and_qlora_are_both_named_when_they_meet(make_tiny: Make) -> None:
    with pytest.raises(ConfigError, match=in_order("qlora", "lora", "'blocks.0")) as told:
        make_tiny("techniques.lora.rank=2", "techniques.qlora.rank=2")
    assert told.value.remedy.changes == (("-qlora",), ("-lora",))


def test_is_refused_under_tensor_parallelism(make_tiny: Make) -> None:
    build = make_tiny()
    mesh = build.plan.mesh.model_copy(update={"tensor": 2})
    plan = build.plan.model_copy(update={"mesh": mesh})
    answer = Lora().supports(replace(build.context, plan=plan))
    assert isinstance(answer, Unsupported) and answer.remedy.text == "mesh.tensor=1"


def test_a_run_saves_its_adapters_alone_and_exports_them_merged(
    tmp_path: Path, plan_file: Path, zygote: Any, given: Callable[..., str]
) -> None:
    """Train, resume from the adapters, sample, and get the same text from the merged folder."""
    plan = [str(plan_file), "goal.steps=8", "name=tuned", "techniques.qlora.rank=2", given()]
    ended = zygote.run(tmp_path, "train", *plan, "optimizer.lr=0.1")
    assert ended.code == 0, ended.err
    folder = next(tmp_path.rglob("tuned/plan.toml")).parent
    saved = Saved(folder / "checkpoints" / "latest")
    kept = {n for n in saved.names() if n.startswith("model/")}
    assert kept and all(n.endswith((".lora_a", ".lora_b")) for n in kept)
    ended = zygote.run(tmp_path, "export", str(folder), "--to", "hf", "--output", "out")
    assert ended.code == 0, ended.err
    text = []
    bare = plan_file.read_text()
    bare = bare[: bare.index("[model]")] + bare[bare.index("[data]") :]
    again = tmp_path / "again.toml"
    again.write_text(bare + f'\n[model]\npretrained = "{tmp_path / "out"}"\n')
    zygote.run(
        tmp_path, "train", str(again), "name=again", "goal.steps=1", "optimizer.lr=1e-12", "--json"
    )
    for name in ("tuned", "again"):
        run = next(tmp_path.rglob(f"{name}/plan.toml")).parent
        ended = zygote.run(
            tmp_path,
            "sample",
            str(run),
            "--temperature",
            "0",
            "--tokens",
            "12",
            "--prompt",
            "the",
            "--json",
        )
        assert ended.code == 0, ended.err
        text.append(json.loads(ended.out)["text"])
    assert text[0] == text[1]


@pytest.mark.parametrize("targets", [ALL, ALL[3:]], ids=str)
def test_a_block_that_runs_again_leaves_out_its_last_frozen_product(
    make_tiny: Make, batch: Batch, monkeypatch: pytest.MonkeyPatch, targets: tuple[str, ...]
) -> None:
    """All that it must keep is there before: nothing needs that result a second time."""
    whole, ran = torch.nn.Linear.forward, Counter[str]()

    def counted(self: torch.nn.Linear, input: torch.Tensor) -> torch.Tensor:
        result = whole(self, input)  # where a block stops, this does not return
        ran[names[self]] += 1
        return result

    named = ",".join(f'"{t}"' for t in targets)
    build = make_tiny(
        "techniques.lora.rank=2",
        f"techniques.lora.targets=[{named}]",
        "techniques.full_checkpoint={}",
    )
    names = {m: n.split(".", 2)[-1] for n, m in build.model.named_modules()}
    monkeypatch.setattr(torch.nn.Linear, "forward", counted)
    micros = batch(build)
    step(build, micros, 0)
    once = build.config.layers * len(micros)
    assert {name: ran[name] for name in ALL} == {**dict.fromkeys(ALL, 2 * once), ALL[3]: once}

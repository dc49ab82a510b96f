"""Adapters in a run: what is frozen, saved, exported, composed and refused."""

import json
import weakref
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import house
import pytest
import torch
import torch.nn.functional as F
from facts import in_order
from tiny import tensors

from headrace.assemble import build as build_module
from headrace.assemble.adapted import AdapterTechnique
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError
from headrace.costs.adapters import AdapterSizes, adapted_ledger
from headrace.costs.count import baseline_ledger
from headrace.data.loader import Micro
from headrace.inference.load import open_model
from headrace.kernels.quantized_weight import QuantizedWeight
from headrace.model.lora import LoraLinear, adapter_evidence, linears_of, merged_state, plain
from headrace.train.checkpoint import Saved
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ALSO = ("embedding", "head")
ALL = ("mixer.qkv", "mixer.out", "mlp.gate_up", "mlp.down")


def adapted(build: Build) -> dict[str, LoraLinear]:
    return {n: m for n, m in build.model.named_modules() if isinstance(m, LoraLinear)}


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


@pytest.mark.parametrize("tied", [False, True])
def test_tables_learn_whole_beside_adapters(
    make_tiny: Make,
    batch: Batch,
    train: Callable[..., Path],
    tmp_path: Path,
    given: Callable[..., str],
    *,
    tied: bool,
) -> None:
    """Their first gradient is that of training everything; a run saves, resumes and merges them."""
    base = given(
        shape := "model.layers=2",
        spread := "model.init_std=0.2",
        f"model.tied_embeddings={str(tied).lower()}",
    )
    words = [base, "optimizer.lr=0.02", "optimizer.clip_norm=1e9"]
    also = f"techniques.qlora={{rank = 2, base = 'int8', train_also = {[*ALSO[tied:]]}}}"
    baseline, build = make_tiny(*words), make_tiny(*words, also)
    exact = make_tiny(*words, also.replace("qlora", "lora").replace("base = 'int8', ", ""))
    tables = ["embed.weight"] if tied else ["embed.weight", "head.weight"]
    gradients = []
    for one in (baseline, exact):

        def keep(build: Build, *_: torch.Tensor) -> bool:
            found = [build.model.get_parameter(name).grad for name in tables]
            gradients.append([g.clone() for g in found if g is not None])
            return False

        step(one, batch(one), 0, keep)
    assert len(gradients[0]) == len(tables)
    for right, found in zip(*gradients, strict=True):
        torch.testing.assert_close(found, right, rtol=1e-5, atol=1e-8)
    before = {n: plain(p).clone() for n, p in build.model.named_parameters()}
    for index in (0, 1):
        step(build, build.loader.step(index).micros, index)
    moved = {n for n, p in build.model.named_parameters() if not torch.equal(plain(p), before[n])}
    assert {n for n in moved if ".lora_" not in n} == {*tables}
    assert check_active(build)["qlora"].numbers["tables"] == len(tables)
    keys = [shape, spread, *words, also, "checkpoint.every_steps=1"]
    folder = train(*keys, "name=tables", "goal.steps=3")
    whole = tensors(folder / "checkpoints" / "latest")
    kept = {n for n in whole if n.startswith("model/") and ".lora_" not in n}
    assert kept == {f"model/{name}" for name in tables}
    again = train(*keys, "name=tables", "goal.steps=3", resume=True, checkpoint="step-2")
    resumed = tensors(again / "checkpoints" / "latest")
    assert all(torch.equal(t, resumed[n]) for n, t in whole.items())
    opened = open_model(folder, catalogue())
    merged = merged_state(opened.model)
    for name in tables:
        assert torch.equal(merged[name], whole[f"model/{name}"])


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
        adapted_ledger(baseline, "lora", AdapterSizes(("mixer.bcx",), 2), None)


@pytest.mark.parametrize(
    "beside",
    [
        "chunked_cross_entropy.chunk_tokens=7",
        "selective_checkpoint={}",
        # The contract compiles both, and compares them with themselves.
        pytest.param("torch_compile.backend=aot_eager", marks=pytest.mark.slow),
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


@pytest.mark.parametrize("gradient", [0.0, 1e-3])
def test_moments_of_8_bits_leave_evidence(make_tiny: Make, gradient: float) -> None:
    """Where gradients are gone, moments tell: an update by zeros moves codes, and no adapter."""
    build = make_tiny("techniques.lora.rank=2", "techniques.adamw_8bit.smallest=1")
    for p in build.routed["adamw_8bit"].values():
        p.grad = torch.full_like(p, gradient)
    build.optimizers["adamw_8bit"].step()
    for p in build.routed["adamw_8bit"].values():
        p.grad = None
    active, _, numbers = adapter_evidence(build.model, build.optimizers.values())
    assert active == bool(gradient) and numbers["reached"] == bool(gradient) * numbers["adapters"]
    (lora,) = (one for one in build.techniques if one.name() == "lora")
    assert isinstance(lora, AdapterTechnique)
    assert {*lora.reached(build).values()} == {bool(gradient)}


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


def test_adapters_are_split_over_tensor_ranks(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    """Losses, gradients and weights of five steps are those of one process."""
    house.put_data_in(str(corpus), str(prepared_folder))
    house.prepare(house.make_plan())
    knobs = {"targets": ("mixer.qkv", "mixer.out", "mlp.down"), "ranks": (3, 2, 4), "alpha": 4.0}
    lora, dora = {**knobs, "b_rate": 4.0, "dropout": 0.5}, {"rank": 2, "alpha": 4.0}
    cases = [
        {"shape": "biased", "states": True, "beside": {"lora": lora}},
        {"shape": "grouped", "states": True, "sequence": False, "beside": {"dora": dora}},
        {"shape": "biased", "beside": {"dora": {**knobs, "dropout": 0.3}}},
        {"shape": "tied", "beside": {"lora": {"train_also": ("head",)}}},
        {
            "shape": "grouped",
            "states": True,
            "model": {"vocab": 308},  # its tables divide
            "beside": {"lora": {"train_also": ALSO}},
        },
    ]
    ranks = Path(__file__).with_name("tensor_parallel_ranks.py")
    data = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, ranks, "equals", ranks=2, cases=cases, **data)


@pytest.mark.parametrize("sequence", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_tensor_ranks_memory_is_predicted(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path, sequence: bool
) -> None:
    """A frozen linear keeps nothing of what ranks gather for it, an adapted one all."""
    house.put_data_in(str(corpus), str(prepared_folder))
    asked: list[tuple[str, dict[str, Any]]] = [
        ("lora", {}),
        *(("lora", {"targets": (one,)}) for one in ("mixer.qkv", "mixer.out", "mlp.down")),
        ("lora", {"train_also": ("head",)}),
        ("dora", {}),
        ("qlora", {}),
        ("qlora", {"base": "int8", "whole_blocks": 1}),
    ]
    cases = [(name, {"rank": 2, **knobs}, sequence) for name, knobs in asked]
    ranks = Path(__file__).with_name("tensor_parallel_ranks.py")
    data = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, ranks, "adapters_memory", ranks=2, cases=cases, **data)


def test_a_tensor_ranks_matmuls_are_predicted(
    zygote: Any, tmp_path: Path, corpus: Path, prepared_folder: Path
) -> None:
    """Each rank has a part of a linear's own matmuls and of one of its adapter's two."""
    house.put_data_in(str(corpus), str(prepared_folder))
    knobs = {"rank": 2, "train_also": ALSO}  # the first block's inputs get a gradient too
    kinds = (("lora", True), ("dora", True), ("qlora", False))
    cases = [(name, knobs, sequence) for name, sequence in kinds]
    ranks = Path(__file__).with_name("tensor_parallel_ranks.py")
    data = {"corpus": str(corpus), "prepared": str(prepared_folder)}
    zygote.call(2, tmp_path, ranks, "adapters_work", ranks=2, cases=cases, **data)


def test_each_target_has_its_rank_and_second_matrices_their_rate(
    make_tiny: Make, batch: Batch
) -> None:
    on = 'targets = ["mixer.qkv", "mlp.down"], ranks = [2, 4], alpha = 8.0, b_rate = 16.0'
    build = make_tiny(f"techniques.lora={{{on}, scaling = 'root_of_rank'}}")
    found = {n: (m.lora_a.size(0), m.scale) for n, m in adapted(build).items()}
    wanted = {"mixer.qkv": (2, 8 / 2**0.5), "mlp.down": (4, 4.0)}
    assert found == {f"blocks.{i}.{end}": pair for i in (0, 1) for end, pair in wanted.items()}
    alike = make_tiny(f"techniques.lora={{{on.replace('16.0', '1.0')}, scaling = 'root_of_rank'}}")
    for one in (build, alike):
        step(one, batch(one), 0)
    for name, linear in adapted(alike).items():  # from zero, where nothing decays
        torch.testing.assert_close(adapted(build)[name].lora_b, 16 * linear.lora_b)
        torch.testing.assert_close(adapted(build)[name].lora_a, linear.lora_a)
    assert check_active(build)["lora"].numbers["rate_ratio"] == 16
    with pytest.raises(ConfigError, match="1 numbers and targets 2 names") as caught:
        make_tiny(f"techniques.lora={{{on.replace('[2, 4]', '[2]')}}}")
    assert caught.value.remedy.changes == (("techniques.lora.ranks=[16, 16]",),)


def test_a_step_leaves_out_features_of_the_corrections_inputs(
    make_tiny: Make, batch: Batch
) -> None:
    """Check that all tokens lack one set of features, each step another, evaluation none."""
    build = make_tiny("techniques.lora={rank = 2, dropout = 0.5}")
    linears, seen = adapted(build), []
    with torch.no_grad():
        for linear in linears.values():
            linear.lora_b.fill_(0.1)
    for index in range(2):
        step(build, build.loader.step(index).micros, index)
        seen.append({n: m.kept.clone() for n, m in linears.items() if m.kept is not None})
    assert seen[0].keys() == linears.keys()
    for name, linear in linears.items():
        one, other = seen[0][name], seen[1][name]
        assert set(one.tolist()) == {0.0, 2.0} and not torch.equal(one, other)
        x = torch.randn(3, linear.in_features)
        kept = linear(x) - F.linear(x, linear.weight)
        right = linear.scale * F.linear(F.linear(x * other, linear.lora_a), linear.lora_b)
        torch.testing.assert_close(kept, right, rtol=1e-4, atol=1e-4)
        with torch.no_grad():
            torch.testing.assert_close(linear(x), F.linear(x, linear.merged()))
    sizes = {len(kept) for kept in seen[0].values()}
    same = [k for k in seen[0].values() if len(k) == min(sizes)]
    assert len({tuple(kept.tolist()) for kept in same}) == len(same)
    assert check_active(build)["lora"].numbers["left_out"] > 0


def test_given_weights_are_stored_one_by_one(
    make_tiny: Make, given: Callable[..., str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No second whole weight is alive when the next is read, so 8B fits beside its 4 bits."""
    alive: dict[str, Any] = {}
    most: list[int] = []
    plain = build_module.adding

    def watched(stored: Any, fresh: Any) -> Any:
        source = plain(stored, fresh)

        def read(name: str, shape: torch.Size) -> torch.Tensor:
            most.append(sum(reference() is not None for reference in alive.values()))
            value = source(name, shape)
            if name.startswith("blocks.") and name.endswith(".weight") and len(shape) == 2:
                alive[name] = weakref.ref(value)
            return value

        return read

    weights = given("model.layers=2")
    monkeypatch.setattr(build_module, "adding", watched)
    build = make_tiny(weights, "techniques.qlora={rank = 2, base = 'int8'}")
    stored = [m.weight for m in build.model.modules() if isinstance(m, LoraLinear)]
    assert len(alive) == len(stored) == 8 and max(most) == 1
    assert all(isinstance(weight.data, QuantizedWeight) for weight in stored)


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
    ran = Counter[str]()

    def counting(whole: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def counted(self: torch.nn.Linear, *given: torch.Tensor) -> torch.Tensor:
            result = whole(self, *given)  # where a block stops, this does not return
            ran[names[self]] += 1
            return result

        return counted

    named = ",".join(f'"{t}"' for t in targets)
    build = make_tiny(
        "techniques.lora.rank=2",
        f"techniques.lora.targets=[{named}]",
        "techniques.full_checkpoint={}",
    )
    names = {m: n.split(".", 2)[-1] for n, m in build.model.named_modules()}
    monkeypatch.setattr(torch.nn.Linear, "forward", counting(torch.nn.Linear.forward))
    monkeypatch.setattr(LoraLinear, "added", counting(LoraLinear.added))
    micros = batch(build)
    step(build, micros, 0)
    once = build.config.layers * len(micros)
    assert {name: ran[name] for name in ALL} == {**dict.fromkeys(ALL, 2 * once), ALL[3]: once}

"""Read what compiled graphs hold between forward and backward, by the budget's fraction."""

from collections.abc import Callable

import pytest
import torch
from facts import in_order
from pieces import gradients

from headrace.assemble.build import make_ledger
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.costs.machine import Machine
from headrace.data.loader import Micro
from headrace.predict.candidates import Asking
from headrace.techniques.memory.memory_budget import _places
from headrace.train.train import step

Make = Callable[..., Build]
Batch = Callable[[Build], list[Micro]]
ON = "techniques.memory_budget.fraction"
COMPILE = "techniques.torch_compile.backend=aot_eager"


@pytest.mark.parametrize("scope", [pytest.param("model", marks=pytest.mark.slow), "block"])
def test_less_is_kept_and_the_gradients_stay(make_tiny: Make, batch: Batch, scope: str) -> None:
    kept, found = [], []
    for fraction in (0.99, 0.5, 0.1):
        build = make_tiny(f"{ON}={fraction}", COMPILE, f"techniques.torch_compile.scope={scope}")
        found.append(gradients(build, batch(build)))
        numbers = check_active(build)["memory_budget"].numbers
        assert numbers["budget"] == fraction and numbers["graphs"] > 0
        kept.append(numbers["kept_bytes"])
    assert kept[0] > kept[1] > kept[2] > 0
    plain = make_tiny(COMPILE, f"techniques.torch_compile.scope={scope}")
    wanted = gradients(plain, batch(plain))
    for less in found:
        for name, right in wanted.items():
            torch.testing.assert_close(less[name], right, rtol=1e-5, atol=1e-7, msg=name)


def test_kept_bytes_are_those_of_the_partition(make_tiny: Make, batch: Batch) -> None:
    """A block whose fraction is tiny holds its input and what all blocks share."""
    build = make_tiny(f"{ON}=1e-6", COMPILE, "techniques.torch_compile.scope=block")
    gradients(build, batch(build))
    kept = check_active(build)["memory_budget"].numbers["kept_bytes"]
    stream = 4 * build.plan.batch.tokens * build.config.dim
    logits = 4 * build.plan.batch.tokens * build.config.vocab
    assert kept <= 5 * stream + logits


def test_weights_in_few_bits_are_none_of_what_is_kept(make_tiny: Make, batch: Batch) -> None:
    """A weight whose tensor is made of others has no storage of its own: theirs are its."""
    build = make_tiny(f"{ON}=0.5", COMPILE, "techniques.qlora.rank=2")
    (base,) = {p for n, p in build.model.named_parameters() if n.endswith("0.mixer.qkv.weight")}
    assert type(base.data) is not torch.Tensor
    assert len({*_places(base)}) > 1 and all(_places(base))
    gradients(build, batch(build))
    assert check_active(build)["memory_budget"].numbers["kept_bytes"] > 0


def test_without_the_runs_flags_it_is_not_in_force(make_tiny: Make, batch: Batch) -> None:
    build = make_tiny(f"{ON}=0.5", COMPILE)
    step(build, batch(build), 0)  # compiled under no budget
    with pytest.raises(RunError, match=in_order("memory_budget", "not in force")) as told:
        check_active(build)
    assert told.value.remedy.changes == (("-memory_budget",),)


def test_nothing_seen_is_no_evidence(make_tiny: Make) -> None:
    build = make_tiny(f"{ON}=0.5", COMPILE)
    assert not build.plan.techniques["memory_budget"].active(build).active


def test_the_flag_is_put_back(make_tiny: Make, batch: Batch) -> None:
    from torch._functorch import config

    build = make_tiny(f"{ON}=0.5", COMPILE)
    gradients(build, batch(build))
    assert config.activation_memory_budget == 1.0


def test_refused_without_a_compiler_that_reads_it(make_tiny: Make) -> None:
    with pytest.raises(UnsupportedError, match="nothing is compiled") as caught:
        make_tiny(f"{ON}=0.5")
    assert "--with torch_compile" in caught.value.remedy.text
    with pytest.raises(UnsupportedError, match="leaves it to autograd") as caught:
        make_tiny(f"{ON}=0.5", "techniques.torch_compile.backend=eager")
    assert "backend=inductor" in caught.value.remedy.text
    with pytest.raises(
        ConfigError, match=in_order("memory_budget", "full_checkpoint", "nothing is left")
    ):
        make_tiny(f"{ON}=0.5", COMPILE, "techniques.full_checkpoint.every=1")


@pytest.mark.parametrize("fraction", [1.0, 1.5, 1])
def test_the_compilers_own_choice_is_no_budget(make_tiny: Make, fraction: float) -> None:
    with pytest.raises(ConfigError, match=in_order(ON, 0.99)) as caught:
        make_tiny(f"{ON}={fraction}", COMPILE)
    assert caught.value.remedy.text == f"{ON}=0.99"
    make_tiny(caught.value.remedy.text, COMPILE)


def test_no_candidate_of_a_sweep_is_the_compilers_own_choice(make_tiny: Make) -> None:
    build = make_tiny(f"{ON}=0.5", COMPILE)
    asking = Asking(build.plan, build.context, Machine.assumed("cpu"), catalogue())
    turned = [w for words in asking.singles(build.plan) for w in words if w.startswith(ON)]
    assert turned == [f"{ON}=0.25"]


def test_the_prediction_falls_with_the_fraction(make_tiny: Make) -> None:
    kept, work = [], []
    for budget in ((), (f"{ON}=0.6",), (f"{ON}=0.3",), (f"{ON}=0.01",)):
        build = make_tiny(COMPILE, *budget)
        ledger = make_ledger(build.plan, build.context)
        kept.append(ledger.at("loss"))
        work.append(ledger.flops.get("recompute", 0.0))
    assert kept == sorted(kept, reverse=True) and kept[0] > kept[-1]
    assert work == sorted(work)
    whole = ledger.sizes["block_flops"] + ledger.sizes["attention_flops"]
    assert work[-1] < whole


@pytest.mark.gpu
@pytest.mark.slow
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpus_peak_falls(make_tiny: Make, batch: Batch) -> None:
    peaks = []
    for budget in ((), (f"{ON}=0.2",)):
        build = make_tiny(
            *budget,
            "techniques.torch_compile.scope=block",
            "device=cuda",
            "model.dim=256",
            "model.heads=4",
            "model.ffn=1024",
            "model.layers=8",
            "data.sequence_length=256",
            "batch.tokens=16384",
        )
        micros = batch(build)
        gradients(build, micros)
        torch.cuda.reset_peak_memory_stats()
        gradients(build, micros)
        peaks.append(torch.cuda.max_memory_allocated())
        assert check_active(build)
        del build
    assert peaks[1] < 0.9 * peaks[0]

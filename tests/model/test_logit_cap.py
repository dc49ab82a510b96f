"""`model.logit_cap`: logits that reach a cap at most, wherever a model's logits are made."""

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import house
import logit_traffic
import pytest
import test_predicts as traced
import torch
import torch.nn.functional as F
from torch import Tensor

from headrace.assemble.build import make_ledger
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.model_config import ModelConfig
from headrace.export.hf import export_hf
from headrace.inference import sample
from headrace.model.head import Head, cross_entropy
from headrace.model.hf_config import config_from_hf, config_to_hf
from headrace.model.mask import Rows
from headrace.plan.plan import Plan
from headrace.train.evaluate import evaluate
from headrace.train.train import step

CAP = 2.0


@pytest.fixture(autouse=True)
def data(corpus: Path, prepared_folder: Path) -> None:
    """Where the tests' text lies."""
    house.put_data_in(str(corpus), str(prepared_folder))


@pytest.fixture
def make_tiny(tiny_plan: Callable[..., Plan]) -> Callable[..., Build]:
    """Return what builds the tiny plan with `key=value` overrides."""

    def make(*overrides: str) -> Build:
        return house.build_of(tiny_plan("model.init_std=0.2", *overrides))

    return make


def pair(*techniques: Any, **model: Any) -> tuple[Build, Build]:
    """Build one model without a cap and one with it, of equal weights, so that logits bend."""
    plans = (house.make_plan(*techniques, model={**model, **cap}) for cap in ({}, {"logit_cap": 2}))
    plain, capped = (house.random_build(plan) for plan in plans)
    return plain, capped


def bent(logits: Tensor) -> Tensor:
    """What a cap means."""
    return CAP * torch.tanh(logits / CAP)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_the_heads_logits_are_the_formulas_in_fp32(precision: str) -> None:
    torch.manual_seed(0)
    hidden, weight = torch.randn(7, 16), torch.randn(1003, 16)
    head = Head(ModelConfig(vocab=1003, dim=16, logit_cap=CAP))
    with torch.autocast("cpu", enabled=precision == "bf16"):
        found, made = head.logits(hidden, weight), F.linear(hidden, weight)
    assert found.dtype == torch.float32 and made.float().abs().max() > 2 * CAP
    torch.testing.assert_close(found, bent(made.float()), rtol=0, atol=0)
    assert 1.9 < found.abs().max() <= CAP


def test_without_a_cap_nothing_is_bent() -> None:
    assert ModelConfig().logit_cap == 0
    plain = Head(ModelConfig(vocab=103, dim=16))
    hidden, weight = torch.randn(7, 16), torch.randn(103, 16)
    assert plain.logits(hidden, weight).equal(F.linear(hidden, weight))


def test_a_cap_below_zero_is_one_message(tiny_plan: Callable[..., Plan]) -> None:
    for wrong in ("-1.0", "inf", "nan", "'x'"):
        with pytest.raises(ConfigError, match=r"model\.logit_cap"):
            tiny_plan(f"model.logit_cap={wrong}")


def test_validation_and_text_are_of_capped_logits(monkeypatch: pytest.MonkeyPatch) -> None:
    plain, capped = pair()
    place = torch.arange(9)[None]
    ids = torch.randint(0, 300, (1, 9))
    with torch.no_grad():
        right = bent(plain.model.logits(ids, Rows(place)))
        torch.testing.assert_close(capped.model.logits(ids, Rows(place)), right)
    seen: list[Tensor] = []
    draw = sample.draw

    def look(logits_BV: Tensor, *given: Any) -> Tensor:
        seen.append(logits_BV)
        return draw(logits_BV, *given)

    monkeypatch.setattr(sample, "draw", look)
    sample.generate(capped.model, ids, new_tokens=3)
    torch.testing.assert_close(seen[0], right[:, -1])
    assert len(seen) == 3 and max(s.abs().max() for s in seen) <= CAP

    # Validation through the objective of the plain model, given logits that are bent by hand.
    def by_hand(logits: Tensor, *given: Any) -> Tensor:
        return cross_entropy(bent(logits), *given)

    found = evaluate(capped)
    monkeypatch.setattr("headrace.train.evaluate.cross_entropy", by_hand)
    wanted, again = evaluate(plain), evaluate(plain)
    assert wanted == again
    assert found.loss_nats == pytest.approx(wanted.loss_nats, rel=1e-6)


def test_a_run_keeps_its_cap(train: Callable[..., Path]) -> None:
    """Check that a run's plan.toml holds its logit cap, for whatever opens the run."""
    folder = train("model.logit_cap=3.5", "goal.steps=1")
    assert "logit_cap = 3.5" in (folder / "plan.toml").read_text()


# --- distillation ----------------------------------------------------------------------------


def test_a_teacher_is_capped_as_it_was_trained(make_tiny: Callable[..., Build]) -> None:
    """The run's own start teaches it nothing, with a cap too: the teacher has the cap as well."""
    build = make_tiny("techniques.distillation={}", f"model.logit_cap={CAP}")
    assert build.notes["distillation"].cap == CAP
    step(build, build.loader.step(0).micros, 0)
    apart = check_active(build)["distillation"].numbers["divergence_nats"]
    assert abs(apart) < 1e-6
    assert build.model.logits(torch.tensor([[1, 2]]), Rows(torch.arange(2)[None])).abs().max() < CAP


def test_a_teacher_without_a_cap_is_not_capped(
    make_tiny: Callable[..., Build], tmp_path: Path
) -> None:
    """One in Hugging Face format has none, whatever the student has."""
    teacher = make_tiny("seed=9")
    state = {n: p.detach() for n, p in teacher.model.named_parameters()}
    tokenizer = tmp_path / "tokenizer.json"
    teacher.prepared.tokenizer.save(tokenizer)
    export_hf(state, teacher.config, tokenizer, tmp_path / "hf", sequence_length=16)
    build = make_tiny(f"techniques.distillation.teacher='{tmp_path / 'hf'}'", "model.logit_cap=0.5")
    (micro, *_) = build.loader.step(0).micros
    step(build, [micro], 0)
    work = build.place(build, micro)
    fresh = make_tiny("model.logit_cap=0.5")
    with torch.no_grad():
        ours = fresh.model.logits(work.ids_BT, work.rows).flatten(0, 1)
        theirs = teacher.model.logits(work.ids_BT, work.rows).flatten(0, 1)
    assert theirs.abs().max() > 0.5 >= ours.abs().max()
    right = F.kl_div(
        ours.log_softmax(-1), theirs.log_softmax(-1), reduction="batchmean", log_target=True
    )
    found = check_active(build)["distillation"].numbers["divergence_nats"]
    assert found == pytest.approx(right.item(), rel=1e-4)


# --- Hugging Face ----------------------------------------------------------------------------


@pytest.mark.parametrize("more", [{}, {"qk_norm": True}])
def test_no_architecture_that_we_write_has_a_cap(more: dict[str, Any]) -> None:
    config = ModelConfig(vocab=67, dim=24, heads=4, logit_cap=30, **more)
    with pytest.raises(UnsupportedError, match=r"model\.logit_cap = 30\.0") as caught:
        config_to_hf(config, sequence_length=16)
    assert "model.logit_cap=0.0" in caught.value.remedy.text
    values = config_to_hf(config.model_copy(update={"logit_cap": 0.0}), sequence_length=16)
    assert config_from_hf(values).logit_cap == 0
    gemma = {**values, "architectures": ["Gemma2ForCausalLM"], "final_logit_softcapping": 30.0}
    assert config_from_hf(gemma).logit_cap == 30, "what is read has one"


def test_weights_that_were_trained_without_a_cap_take_none(
    make_tiny: Callable[..., Build], tmp_path: Path
) -> None:
    build = make_tiny()
    state = {n: p.detach() for n, p in build.model.named_parameters()}
    tokenizer = tmp_path / "tokenizer.json"
    build.prepared.tokenizer.save(tokenizer)
    export_hf(state, build.config, tokenizer, tmp_path / "hf", sequence_length=16)
    keys = (f"model.pretrained='{tmp_path / 'hf'}'", f"data.tokenizer='{tokenizer}'")
    with pytest.raises(ConfigError, match=r"model\.logit_cap = 15\.0") as caught:
        make_tiny(*keys, "model.logit_cap=15.0")
    assert caught.value.remedy.text == "model.logit_cap=0.0"


# --- the ledger ------------------------------------------------------------------------------


BESIDE: dict[str, dict[str, dict[str, Any]]] = {
    "alone": {},
    "z_loss": {"z_loss": {}},
    "smoothed": {"label_smoothing": {}},
    "both": {"z_loss": {}, "label_smoothing": {}},
}
CHUNKS: dict[str, dict[str, dict[str, Any]]] = {
    "whole": {},
    "chunks": {"chunked_cross_entropy": {"chunk_tokens": 64, "native": False}},
    "halves": {"chunked_cross_entropy": {"chunk_tokens": 128, "native": False}},
}


def sized(precision: str, *tables: dict[str, dict[str, Any]], cap: float = CAP) -> Plan:
    """A plan at a vocabulary whose logits are most of a step's memory."""
    plan = traced.plan_of(layers=2, vocab=4096, precision=precision, logit_cap=cap)
    named = {name: knobs for table in tables for name, knobs in table.items()}
    on = {name: house.Variant(name, knobs).technique() for name, knobs in named.items()}
    return plan.replaced(techniques=on)


def cases_of_peaks() -> list[Any]:
    """Every head in both precisions; quick is each whole or chunked one in one of them, in turn."""
    heads = [*itertools.product(CHUNKS, BESIDE), ("whole", "distillation")]
    return [
        pytest.param(
            *(beside, chunked, precision),
            marks=[pytest.mark.slow] * (chunked == "halves" or (number + row) % 2),
        )
        for number, (chunked, beside) in enumerate(heads)
        for row, precision in enumerate(("fp32", "bf16"), start=chunked == "chunks")
    ]


@pytest.mark.parametrize(("beside", "chunked", "precision"), cases_of_peaks())
def test_the_peak_is_foreseen(beside: str, chunked: str, precision: str) -> None:
    """One more fp32 tensor of the logits, the tanh, is kept where the peak is."""
    tables = BESIDE.get(beside, {beside: {}}), CHUNKS[chunked]
    plain, capped = (traced.Traced(sized(precision, *tables, cap=cap)) for cap in (0.0, CAP))
    assert capped.ledger.peak()[1] == pytest.approx(capped.peak, rel=0.02)
    tokens = {"chunks": 64, "halves": 128}.get(chunked, traced.ROWS * traced.LENGTH)
    kept_already = "z_loss" in tables[0] and chunked != "whole" and precision == "fp32"
    tensors = 2 if kept_already else 1  # a chunk's own fp32 logits are no capped ones
    for grown in (
        capped.peak - plain.peak,
        capped.ledger.peak()[1] - plain.ledger.peak()[1],
    ):
        assert grown == pytest.approx(tensors * 4 * 4096 * tokens, rel=0.03)


def test_a_small_batch_peaks_elsewhere() -> None:
    small = traced.Traced(
        traced.plan_of(rows=1, vocab=307, dim=96, ffn=160, kv_heads=2, logit_cap=CAP)
    )
    assert small.ledger.peak()[1] == pytest.approx(small.peak, rel=traced.PEAK_BAND)


@pytest.mark.parametrize("chunked", ["whole", "chunks"])
def test_eager_passes_are_counted(chunked: str) -> None:
    """A cap adds what torch's own operations move: three kernels forward, and three backward."""
    fused = {"fused": False} if chunked == "chunks" else {}
    tables = {name: {**knobs, **fused} for name, knobs in CHUNKS[chunked].items()}
    plans = [sized("bf16", tables, cap=cap).replaced(device="cuda") for cap in (0.0, CAP)]
    plain, capped = (make_ledger(plan, house.context_on("cuda", plan)) for plan in plans)
    moved = [logit_traffic.of_loss(cross_entropy, cap) for cap in (0.0, CAP)]
    logits = 4096 * traced.ROWS * traced.LENGTH
    for part in ("forward", "backward"):
        before, after = (ledger.work[f"loss/{part}"] for ledger in (plain, capped))
        more = after.count * (after.bytes - before.bytes)
        assert more == pytest.approx(logits * (moved[1][part] - moved[0][part])) and more > 0
        assert after.kernels - before.kernels == 3
        assert after.fused == before.fused
    others = {name: work for name, work in capped.work.items() if not name.startswith("loss/")}
    assert others == {name: w for name, w in plain.work.items() if not name.startswith("loss/")}


@pytest.mark.parametrize("head", ["fused_cross_entropy", "chunked_cross_entropy", "torch_compile"])
def test_kernels_and_compilers_cap_in_passing(head: str) -> None:
    """Check that a cap changes neither memory, work nor FLOPs of these heads on a GPU."""
    found = []
    for cap in (0.0, CAP):
        plan = sized("bf16", {head: {}}, cap=cap).replaced(device="cuda")
        ledger = make_ledger(plan, house.context_on("cuda", plan))
        found.append((ledger.memory, ledger.work, ledger.flops))
    assert found[0] == found[1]

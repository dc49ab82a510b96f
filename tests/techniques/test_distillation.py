"""The teacher's term against whole softmaxes, and the teacher against the model that it is."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from facts import in_order
from pieces import left
from torch import Tensor

from headrace.assemble import teacher as teacher_module
from headrace.assemble.build import make_ledger
from headrace.assemble.filled import check_active
from headrace.assemble.sockets import Build
from headrace.assemble.teacher import likeliest
from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.data.loader import Micro
from headrace.export.hf import export_hf
from headrace.model.head import IGNORED, Vocabulary
from headrace.observe.signals import memory_tracker
from headrace.techniques.adapt.distillation import divergence, kept_divergence
from headrace.train.train import step

NAME = "distillation"
KEPT = f"techniques.{NAME}.top_k=320"
"""The tiny plan's whole vocabulary."""


@pytest.mark.parametrize("temperature", [1.0, 2.5])
def test_divergence_equals_torchs(temperature: float) -> None:
    torch.manual_seed(0)
    logits = (3 * torch.randn(11, 29)).requires_grad_()
    taught = 3 * torch.randn(11, 29)
    twin = logits.detach().double().requires_grad_()
    right = F.kl_div(
        (twin / temperature).log_softmax(-1),
        (taught.double() / temperature).log_softmax(-1),
        reduction="none",
        log_target=True,
    ).sum(-1)
    found = divergence(logits, taught, temperature, Vocabulary())
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    right.sum().backward()
    assert logits.grad is not None and twin.grad is not None
    torch.testing.assert_close(logits.grad.double(), twin.grad, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("top_k", [4, 29])
def test_kept_tokens_and_the_others_are_outcomes(top_k: int) -> None:
    """The divergence is that of K + 1 outcomes; of the whole vocabulary it is the whole one."""
    torch.manual_seed(0)
    logits = (3 * torch.randn(11, 29)).requires_grad_()
    taught = 3 * torch.randn(11, 29)
    ids, logs, rest = likeliest(taught / 2.5, top_k)
    twin = logits.detach().double().requires_grad_()
    outcomes = []
    for one in (twin, taught.double()):
        share = (one / 2.5).softmax(-1)
        some = share.gather(-1, ids)
        others = share.scatter(-1, ids, 0.0).sum(-1, keepdim=True)
        outcomes.append(torch.cat([some, others], -1) if top_k < 29 else some)
    right = F.kl_div(outcomes[0].log(), outcomes[1], reduction="none").sum(-1)
    found = kept_divergence(
        logits,
        ids,
        torch.cat([logs, rest[:, None]], -1),
        2.5,
        Vocabulary(),
        is_whole=top_k == 29,
    )
    torch.testing.assert_close(found.double(), right, rtol=1e-5, atol=1e-5)
    found.sum().backward()
    right.sum().backward()
    assert logits.grad is not None and twin.grad is not None
    torch.testing.assert_close(logits.grad.double(), twin.grad, rtol=1e-5, atol=1e-6)
    if top_k == 29:
        whole = divergence(logits, taught, 2.5, Vocabulary())
        torch.testing.assert_close(found, whole, rtol=1e-5, atol=1e-5)


class Half(Vocabulary):
    """The columns before or after a border; what another rank would send is computed here."""

    def __init__(self, whole: Tensor, taught: Tensor, columns: slice) -> None:
        self.whole, self.taught, self.columns = whole, taught, columns

    def _complete(self, mine: Tensor, whole: Tensor) -> Tensor:
        """Return the value of an all-reduce, with the gradient of this rank's own part."""
        return mine + (whole - mine).detach()

    def logsumexp(self, logits_NV: Tensor) -> Tensor:
        whole = self.whole if logits_NV.requires_grad else self.taught
        most = whole.amax(-1)
        mine = (logits_NV - most[:, None]).exp().sum(-1)
        return self._complete(mine, (whole - most[:, None]).exp().sum(-1)).log() + most

    def sum(self, values_NV: Tensor) -> Tensor:
        share = self.taught.softmax(-1)
        return self._complete(values_NV.sum(-1), (share * (self.taught - self.whole)).sum(-1))


def test_gradients_are_right_on_shards_of_the_vocabulary() -> None:
    """Each shard computes its own columns' gradients from reduced values alone."""
    torch.manual_seed(0)
    whole, taught = 3 * torch.randn(7, 10), 3 * torch.randn(7, 10)
    plain = whole.clone().requires_grad_()
    divergence(plain, taught, 1.0, Vocabulary()).sum().backward()
    for columns in (slice(0, 4), slice(4, 10)):
        mine = whole[:, columns].clone().requires_grad_()
        found = divergence(mine, taught[:, columns], 1.0, Half(whole, taught, columns))
        found.sum().backward()
        assert plain.grad is not None
        torch.testing.assert_close(mine.grad, plain.grad[:, columns], rtol=1e-5, atol=1e-6)


# --- in a run --------------------------------------------------------------------------------


@pytest.fixture
def teacher(make_tiny: Callable[..., Build], tmp_path: Path) -> tuple[Path, Build]:
    """Make a wider model of another seed, in Hugging Face format, and as we hold it."""
    build = make_tiny("model.dim=24", "model.heads=3", "seed=9", "model.tied_embeddings=true")
    state = {n: p.detach() for n, p in build.model.named_parameters()}
    tokenizer = tmp_path / "tokenizer.json"
    build.prepared.tokenizer.save(tokenizer)
    export_hf(state, build.config, tokenizer, tmp_path / "hf", sequence_length=16)
    return tmp_path / "hf", build


def reference(build: Build, micros: list[Micro], teacher: Build, weight: float, heat: float) -> Any:
    """Compute loss and gradients from whole logits and torch's own losses."""
    total, targets = torch.zeros(()), 0
    for micro in micros:
        work = build.place(build, micro)
        logits = build.model.logits(work.ids_BT, work.rows).flatten(0, 1)
        with torch.no_grad():
            taught = teacher.model.logits(work.ids_BT, work.rows).flatten(0, 1)
        counts = work.targets_BT.flatten() != IGNORED
        total = total + F.cross_entropy(logits, work.targets_BT.flatten(), reduction="sum")
        apart = F.kl_div(
            (logits / heat).log_softmax(-1), (taught / heat).softmax(-1), reduction="none"
        )
        total = total + weight * heat**2 * apart.sum(-1)[counts].sum()
        targets += int(counts.sum())
    loss = total / targets
    loss.backward()
    return loss.detach(), [p.grad for p in build.model.parameters()]


def ignoring(micros: list[Micro]) -> list[Micro]:
    """Leave the first micro-batch without targets, and the others with uneven ones."""
    for place, micro in enumerate(micros):
        draw = torch.Generator().manual_seed(place)
        lost = torch.rand(micro.targets_BT.shape, generator=draw) < (0.2 * place if place else 1.0)
        micro.targets_BT[lost] = IGNORED
    return micros


@pytest.mark.parametrize(
    "more",
    [
        (),
        ("techniques.chunked_cross_entropy.chunk_tokens=7",),
        pytest.param(  # a set of the contract compiles it, too
            ("techniques.torch_compile.backend=aot_eager",), marks=pytest.mark.slow
        ),
        ("techniques.document_packing={}", "techniques.sequence_length_schedule.start=8"),
        (KEPT,),
        (KEPT, "techniques.best_fit_packing={}", "techniques.chunked_cross_entropy.chunk_tokens=7"),
    ],
    ids=["plain", "chunked", "compiled", "packed", "kept", "kept-packed-chunked"],
)
def test_loss_and_gradients_equal_whole_softmaxes(
    more: tuple[str, ...],
    teacher: tuple[Path, Build],
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
) -> None:
    path, wide = teacher
    knobs = (f"teacher='{path}'", "weight=0.7", "temperature=1.5")
    with_ = ("batch.micro_sequences=2", "optimizer.clip_norm=0", *more)
    build = make_tiny(*with_, *(f"techniques.{NAME}.{k}" for k in knobs))
    names = [n for n, _ in build.model.named_parameters()]
    twin = make_tiny(*with_[:2], *(m for m in more if "packing" in m))
    assert names == [n for n, _ in twin.model.named_parameters()]
    wide.model.mask = twin.model.mask
    micros = ignoring(batch(build))
    numbers = step(build, micros, 0)
    cut = [build.recut[0](build, m) for m in micros] if build.recut else micros
    loss, gradients = reference(twin, cut, wide, 0.7, 1.5)
    assert numbers[0] == pytest.approx(float(loss), rel=1e-5)
    for name, p, right in zip(names, build.model.parameters(), gradients, strict=True):
        assert p.grad is not None and right is not None
        assert (p.grad - right).abs().max() <= 1e-5 * right.abs().max(), name
    found = check_active(build)[NAME]
    assert found.numbers["tokens"] == int(numbers[3])
    assert found.numbers["divergence_nats"] > 0.01


def test_the_models_own_start_teaches_nothing_until_it_has_moved(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    build = make_tiny(f"techniques.{NAME}={{}}")
    apart = []
    for index in range(3):
        step(build, batch(build), index)
        apart.append(check_active(build)[NAME].numbers["divergence_nats"])
    assert abs(apart[0]) < 1e-6 < 1e-3 < apart[1] < apart[2]
    teacher = build.notes[NAME].teacher
    assert not any(p.requires_grad for p in teacher.parameters())


def test_it_holds_a_model_near_its_start(
    make_tiny: Callable[..., Build], batch: Callable[[Build], list[Micro]]
) -> None:
    ends = []
    for weight in (0.01, 10.0):
        build = make_tiny(f"techniques.{NAME}.weight={weight}")
        for index in range(6):
            step(build, batch(build), index)
        ends.append(check_active(build)[NAME].numbers["divergence_nats"])
    assert ends[1] < 0.5 * ends[0]


def test_refuses_another_vocabulary_and_a_run(
    teacher: tuple[Path, Build], make_tiny: Callable[..., Build], tmp_path: Path
) -> None:
    path, _ = teacher
    with pytest.raises(ConfigError, match="vocabulary entries"):
        make_tiny(f"techniques.{NAME}.teacher='{path}'", "model.vocab=640")
    run = tmp_path / "a-run"
    run.mkdir()
    (run / "plan.toml").touch()
    with pytest.raises(ConfigError, match="headrace export"):
        make_tiny(f"techniques.{NAME}.teacher='{run}'")
    with pytest.raises(
        ConfigError, match=in_order("teacher", tmp_path / "nothing", "does not exist")
    ):
        make_tiny(f"techniques.{NAME}.teacher='{tmp_path / 'nothing'}'")


# --- kept on disk ----------------------------------------------------------------------------


def test_the_teacher_reads_the_text_once(
    teacher: tuple[Path, Build],
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Writing that was interrupted goes on; a later run needs no teacher in memory."""
    keys = (f"data.directory={tmp_path / 'data'}", f"techniques.{NAME}.teacher='{teacher[0]}'")
    keys += ("data.workers=2", f"techniques.{NAME}.top_k=8")
    read, calls, record = teacher_module._records, [], 16 * (8 * 6 + 4) + 8
    monkeypatch.setattr("headrace.data.teacher_shards.PART_BYTES", 5 * record)

    def interrupted(build: Build, shards: Any, teaching: Any, units: Any, heat: float) -> Any:
        calls.append(len(units))
        if len(calls) == 3:
            raise RunError("interrupted")
        return read(build, shards, teaching, units, heat)

    monkeypatch.setattr(teacher_module, "_records", interrupted)
    with pytest.raises(RunError, match="interrupted"):
        make_tiny(*keys)
    build = make_tiny(*keys)
    (folder,) = (tmp_path / "data").glob("*/teacher-*")
    parts = sorted(folder.glob("part-*.bin"))
    assert len(calls) == len(parts) + 1, "two parts were there, and one began again"
    assert sum(part.stat().st_size for part in parts) == sum(build.loader.packer.units) * record
    again = make_tiny(*keys, f"techniques.{NAME}.weight=2.0")
    assert len(calls) == len(parts) + 1 and build.notes[NAME].teacher is None
    numbers = [step(one, batch(one), 0)[0] for one in (build, again)]
    assert numbers[1] > numbers[0]
    assert check_active(again)[NAME].numbers["divergence_nats"] > 0.01
    make_tiny(*keys, f"techniques.{NAME}.top_k=4")
    make_tiny(*keys, f"techniques.{NAME}.temperature=2.0")
    make_tiny(*keys, "techniques.best_fit_packing={}")
    assert len([*(tmp_path / "data").glob("*/teacher-*")]) == 4, "each is another identity"
    whole = parts[1].read_bytes()
    parts[1].write_bytes(whole[:-1] + b"x")
    with pytest.raises(ConfigError, match=in_order(folder, parts[1].name)):
        make_tiny(*keys)
    parts[1].write_bytes(bytes(8) + whole[8:])
    monkeypatch.setattr("headrace.data.teacher_shards.VERIFY_BYTES", 0)
    build = make_tiny(*keys)
    with pytest.raises(RunError, match="other tokens"):
        for unit in range(5, 10):
            build.loader.beside[0](0, unit, build.loader.packer.row(0, unit))


def test_says_what_it_takes_and_refuses_what_the_disk_lacks(
    teacher: tuple[Path, Build],
    make_tiny: Callable[..., Build],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    keys = (f"data.directory={tmp_path / 'data'}", f"techniques.{NAME}.teacher='{teacher[0]}'")
    build = make_tiny(*keys)
    rows = sum(build.loader.packer.units)
    free = rows * (16 * (5 * 6 + 4) + 8)
    monkeypatch.setattr("shutil.disk_usage", lambda path: left(free=free))
    with pytest.raises(UnsupportedError, match="52 bytes a token") as refused:
        make_tiny(*keys, f"techniques.{NAME}.top_k=8")
    assert refused.value.remedy.changes == ((f"techniques.{NAME}.top_k=5",),)
    make_tiny(*keys, f"techniques.{NAME}.top_k=5")


def test_refuses_too_many_tokens_and_rows_that_are_too_long(
    teacher: tuple[Path, Build], make_tiny: Callable[..., Build]
) -> None:
    key = f"techniques.{NAME}.teacher='{teacher[0]}'"
    with pytest.raises(ConfigError, match=in_order("top_k = 321", "320")):
        make_tiny(key, f"techniques.{NAME}.top_k=321")
    with pytest.raises(ConfigError, match=in_order("rows of 16", "data.sequence_length = 32")):
        make_tiny(key, "data.sequence_length=32")
    with pytest.raises(UnsupportedError, match="length_mixing cuts them anew"):
        make_tiny(
            *(key, f"techniques.{NAME}.top_k=8", "techniques.document_packing={}"),
            "techniques.length_mixing.lengths=[8,0]",
        )


@pytest.mark.parametrize("beside", [(), ("techniques.chunked_cross_entropy.chunk_tokens=32",)])
def test_memory_is_predicted(
    beside: tuple[str, ...],
    make_tiny: Callable[..., Build],
    batch: Callable[[Build], list[Micro]],
    tmp_path: Path,
) -> None:
    """The peak is at the loss: what the term makes of the logits, whole and in chunks."""
    keys = ("model.vocab=2048", "batch.tokens=128", "batch.micro_sequences=8")
    plain = make_tiny(*keys)
    tokenizer = tmp_path / "tokenizer.json"
    plain.prepared.tokenizer.save(tokenizer)
    state = {n: p.detach() for n, p in plain.model.named_parameters()}
    export_hf(state, plain.config, tokenizer, tmp_path / "hf", sequence_length=16)
    words = (f"techniques.{NAME}.teacher='{tmp_path / 'hf'}'", f"techniques.{NAME}.top_k=8")
    build = make_tiny(*keys, *words, f"data.directory={tmp_path / 'data'}", *beside)
    step(build, micros := batch(build), 0)
    build.model.zero_grad()
    tracker = memory_tracker(build.model, [*build.optimizers.values()])
    with tracker:
        step(build, micros, 1)
    (found,) = tracker.get_tracker_snapshot("peak").values()
    peak = {getattr(name, "value", str(name)): size for name, size in found.items()}["Total"]
    ledger = make_ledger(build.plan, build.context)
    assert ledger.peak() == ("loss", pytest.approx(peak, rel=0.05))

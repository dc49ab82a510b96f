"""What a sweep finds, with techniques planted whose effect is known, and against receipts."""

import math
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from statistics import mean
from typing import Any, ClassVar

import pytest
import torch
from facts import tells
from rich.console import Console
from scoring.accuracy import kendall_tau, regret
from test_planner import measured

from headrace.assemble.build import make_ledger
from headrace.assemble.context import elsewhere, make_context
from headrace.cli.catalogue import catalogue
from headrace.cli.terminal import show_table
from headrace.core.errors import UnsupportedError
from headrace.core.remedy import mend
from headrace.costs.ledger import Ledger, Line
from headrace.costs.machine import Machine
from headrace.costs.step import step_time
from headrace.plan.changes import changed, difference, parse
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Context, Stage, Supported, Technique, Unsupported
from headrace.predict.candidates import Asking, singles
from headrace.predict.sweep import HEAD, Sweep, command, format_summary, plain, sweep, table
from headrace.recipes import read_recipe

H200 = Machine.assumed("NVIDIA H200")
SHAPE = (Path(__file__).parents[2] / "benchmarks" / "plans" / "160m.toml").read_text()


class Planted(Technique[Any]):
    """Says what it does to a step, and nothing else."""

    timed: ClassVar[bool] = True
    stage: ClassVar[Stage] = Stage.STEP

    @classmethod
    def name(cls) -> str:
        return cls.__name__.lower()

    def supports(self, context: Context) -> Supported | Unsupported:
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        return faster(ledger, 1.0)


def faster(ledger: Ledger, share: float) -> Ledger:
    """Return a ledger whose work takes this share of its time."""
    return ledger.reworked(lambda _, piece: replace(piece, count=piece.count * share))


class Quick(Planted):
    def predict(self, ledger: Ledger) -> Ledger:
        return faster(ledger, 0.5)


class Huge(Planted):
    def predict(self, ledger: Ledger) -> Ledger:
        return faster(ledger, 0.1).with_line("huge", Line(2**40, ("always",)))


class Rival(Planted):
    """Owns what another owns, and is better than it."""

    claims: ClassVar[tuple[str, ...]] = ("parts.attend",)

    def predict(self, ledger: Ledger) -> Ledger:
        return faster(ledger, 0.9)


class Learner(Quick):
    equality: ClassVar = "learning"


class Silent(Quick):
    timed: ClassVar[bool] = False


class Picky(Quick):
    """Needs another, and says so."""

    def supports(self, context: Context) -> Supported | Unsupported:
        if "rival" in context.plan.techniques:
            return Supported()
        return Unsupported("it is alone", mend("+rival"))


class Eager(Planted):
    """Does nothing, and only beside another."""

    def supports(self, context: Context) -> Supported | Unsupported:
        quick = "quick" in context.plan.techniques
        return Supported() if quick else Unsupported("it is alone", mend("+quick"))


class Little(Planted):
    def predict(self, ledger: Ledger) -> Ledger:
        return faster(ledger, 0.99)


class Less(Little):
    """Gain 1% as `Little` does, under another name."""


class Frugal(Planted):
    """Slower, and a larger micro-batch fits beside it."""

    def predict(self, ledger: Ledger) -> Ledger:
        return faster(ledger, 1.02).scaled(lambda name: "/" in name or name == "logits", 0.1)


@cache
def known() -> Catalogue:
    return catalogue()


def beside(*kinds: type[Technique[Any]]) -> Catalogue:
    """Return a catalogue of these planted techniques and three real ones."""
    real = {n: known().techniques[n] for n in ("cudnn_attention", "flex_attention", "z_loss")}
    return Catalogue({**real, **{kind.name(): kind for kind in kinds}}, known().families)


def swept(
    *overrides: str, of: Catalogue, with_: Iterable[str] = (), machine: Machine = H200, **how: Any
) -> Sweep:
    text = SHAPE.partition("[techniques")[0]
    plan = Plan.read(text, of, overrides=overrides, with_=with_)
    context = elsewhere(make_context(plan, torch.device("cpu")), "NVIDIA H200")
    settings: dict[str, Any] = {"depth": 2, "width": 4} | how
    return sweep(plan, context, machine, of, **settings)


def test_what_is_foreseen_to_be_faster_is_first() -> None:
    found = swept(of=beside(Quick, Planted))
    assert found.ranked[0].changes == ("+quick",)
    assert found.gain(found.ranked[0]) == pytest.approx(0.9, abs=0.1)
    assert found.start in found.ranked and found.gain(found.start) == 0
    steps = [c.prediction.time.step_s or math.inf for c in found.ranked]
    assert steps == sorted(steps)
    assert ("+planted",) in [c.changes for c in found.idle]
    assert not any("+planted" in c.changes for c in found.ranked)


def test_what_does_not_fit_is_counted_and_not_ranked() -> None:
    found = swept(of=beside(Huge))
    assert found.too_large > 0
    assert not any("+huge" in c.changes for c in found.ranked)
    assert {c.prediction.memory.fits for c in found.ranked} <= {"yes", "tight"}


def test_a_start_that_does_not_fit_is_ranked_last() -> None:
    found = swept(of=beside(Quick), machine=replace(H200, memory_bytes=30 * 2**30), depth=3)
    assert found.start is found.ranked[-1] and found.start.prediction.memory.fits == "no"
    assert {"+quick"} < set(found.ranked[0].changes), "with a smaller micro-batch"
    assert found.ranked[0].prediction.memory.fits == "yes"


def test_what_fits_tightly_must_promise_more() -> None:
    quick = swept(of=beside(Quick)).ranked[0].prediction
    near = replace(H200, memory_bytes=int(quick.memory.peak_bytes / 0.95) + H200.context_bytes)
    found = swept(of=beside(Rival), machine=near, depth=1)
    fits = {c.changes: c.prediction.memory.fits for c in found.ranked}
    assert next(iter(fits)) == ("+rival",) and fits["+rival",] == "tight", "10% is worth it"
    assert fits[()] == "tight" and list(fits).index(()) > 1


def test_two_owners_of_a_socket_never_stand_together() -> None:
    found = swept(of=beside(Rival, Quick), with_=["cudnn_attention"], depth=3)
    assert set(found.ranked[0].changes) == {"-cudnn_attention", "+rival", "+quick"}
    for candidate in found.ranked:
        claims = [s for t in candidate.plan.techniques.values() for s in t.claims]
        assert len(claims) == len(set(claims)), candidate.changes
    assert not any("own the socket" in reason for reason in found.refused)
    context = elsewhere(make_context(found.start.plan, torch.device("cpu")), "NVIDIA H200")
    asking = Asking(found.start.plan, context, H200, beside(Rival))
    assert ("+rival", "-cudnn_attention") in asking.singles(asking.start)
    assert ("+rival",) not in asking.singles(asking.start)


def test_micro_batches_divide_the_rows() -> None:
    found = swept("batch.tokens=24576", of=beside(), depth=1)
    sizes = {c.plan.batch.micro_sequences for c in [*found.ranked, *found.idle]}
    assert sizes == {0, 1, 2, 3, 4, 6}, "12 rows, all of them at the start"
    assert not any("does not divide" in reason for reason in found.refused)


def test_what_changes_learning_is_left_alone_unless_asked() -> None:
    words = {w for c in swept(of=beside(Learner), with_=["z_loss"]).ranked for w in c.changes}
    assert not words & {"+learner", "-z_loss"}
    asked = swept(of=beside(Learner), with_=["z_loss"], learning=True)
    assert any("+learner" in c.changes for c in [*asked.ranked, *asked.unknown])


@pytest.mark.parametrize(
    ("keys", "gone"),
    [
        (["model.position=rope"], {"rope"}),
        (["model.position=none"], set()),
        (["model.tied_embeddings=true", "model.kv_heads=6"], {"rope", "tied_embeddings", "gqa"}),
    ],
)
def test_a_design_that_the_plan_has_already_is_not_asked_about(
    keys: list[str], gone: set[str]
) -> None:
    """What does more than to rewrite keys is, as `alibi` where no positions are."""
    start = Plan.read(SHAPE, catalogue(), overrides=keys)
    context = elsewhere(make_context(start, torch.device("cpu")), "NVIDIA H200")
    asking = Asking(start, context, H200, catalogue(), learning=True)
    put_in = {words[0][1:] for words in asking.singles(start) if words[0][0] == "+"}
    designs = {"rope", "tied_embeddings", "gqa", "alibi"}
    assert designs - put_in == gone


def test_a_fine_tuning_is_asked_about_what_applies_to_it() -> None:
    """Another adapter takes the place of the plan's; how it is known is the classes' data alone."""
    words = ["model.pretrained=weights", "data.sources=talks.jsonl"]
    start = Plan.read(read_recipe("finetune"), catalogue(), overrides=words, with_=["lora"])
    context = elsewhere(make_context(start, torch.device("cpu")), "NVIDIA H200")
    keeping = Asking(start, context, H200, catalogue())
    put_in = {words for words in keeping.singles(start) if words[0][0] == "+"}
    assert {("+chunked_cross_entropy",), ("+torch_compile",), ("+full_checkpoint",)} <= put_in
    put_in = {words for words in replace(keeping, learning=True).singles(start)}
    adapters = {("+qlora", "-lora"), ("+dora", "-lora"), ("-lora",)}
    assert adapters <= put_in and not {("+qlora",), ("+dora",)} & put_in
    assert ("+best_fit_packing",) in put_in and ("techniques.lora.rank=32",) in put_in


def test_what_has_no_time_is_told_apart() -> None:
    found = swept(of=beside(Silent, Quick))
    assert [c.changes for c in found.unknown] == [("+silent",)]
    assert found.unpriced["silent"] > 1 and "silent" in format_summary(found)


def test_a_remedy_is_tried() -> None:
    found = swept(of=beside(Picky, Rival))
    assert set(found.ranked[0].changes) == {"+picky", "+rival"}
    assert not any("picky" in reason for reason in found.refused)
    start = found.start.plan
    context = elsewhere(make_context(start, torch.device("cpu")), "NVIDIA H200")
    alone = [c.changes for c in singles(Asking(start, context, H200, beside(Picky, Rival)))]
    assert ("+picky", "+rival") in alone and ("+rival",) in alone


def test_knobs_for_tests_and_for_what_a_user_accepts_are_not_turned() -> None:
    start = Plan.read(SHAPE, catalogue())
    context = elsewhere(make_context(start, torch.device("cpu")), "NVIDIA H200")
    asking = Asking(start, context, H200, catalogue())
    keys = {word.partition("=")[0] for changes in asking.singles(asking.start) for word in changes}
    compiler = {key for key in keys if key.startswith("techniques.torch_compile.")}
    assert compiler == {"techniques.torch_compile.scope", "techniques.torch_compile.mode"}
    assert "techniques.bf16_parameters.fused" in keys
    assert "techniques.bf16_parameters.rounding" not in keys, "weights without a master"


def test_a_change_that_does_nothing_rides_on_no_other() -> None:
    found = swept(of=beside(Eager, Quick))
    assert found.ranked[0].changes == ("+quick",)
    assert not any("+eager" in c.changes for c in found.ranked)


def test_changes_that_all_gain_are_found_together_before_the_limit() -> None:
    """Six levels away, where a beam alone does not come within so few predictions."""
    gains = {"predict": lambda self, ledger: faster(ledger, 0.9)}
    kinds = [type(f"Gain{n}", (Planted,), gains) for n in range(6)]
    found = swept(of=beside(*kinds), depth=8, limit=100)
    assert {f"+gain{n}" for n in range(6)} <= {*found.ranked[0].changes}


def test_what_saves_memory_lets_a_larger_micro_batch_in() -> None:
    small = replace(H200, memory_bytes=8 * 2**30)
    found = swept(
        "batch.micro_sequences=1", of=beside(Frugal, Little, Less), machine=small, depth=3, width=2
    )
    assert "+frugal" in found.ranked[0].changes, "though each of the others promised more"
    alone = max(c.plan.micro_rows for c in found.ranked if "+frugal" not in c.changes)
    assert found.ranked[0].plan.micro_rows > 2 * alone


def test_memory_is_saved_at_the_same_speed_first() -> None:
    found = swept(of=beside(Frugal, Quick), aim="memory", depth=3)
    peaks = [c.prediction.memory.peak_bytes for c in found.ranked]
    slower = [(found.gain(c) or 0.0) < -0.006 for c in found.ranked]
    assert slower == sorted(slower) and not slower[0] and slower[-1]
    as_fast = peaks[: slower.index(True)]
    assert as_fast == sorted(as_fast) and {"+frugal", "+quick"} <= set(found.ranked[0].changes)


def test_a_cpu_without_rates_ranks_nothing_and_lists_what_may_be_measured(
    tiny_plan: Callable[..., Plan],
) -> None:
    plan = tiny_plan()
    context = make_context(plan, torch.device("cpu"))
    found = sweep(plan, context, Machine.assumed("cpu"), beside(Quick))
    peaks = [c.prediction.memory.peak_bytes for c in found.unknown]
    assert found.ranked == [] and peaks == sorted(peaks)
    assert ("+quick",) in [c.changes for c in found.unknown]
    assert table(found)[0][-1] == "(the plan as it is)"
    assert tells(format_summary(found), "CPU", "rates", "not known")


def test_a_start_that_cannot_run_is_an_error() -> None:
    with pytest.raises(UnsupportedError, match="it is alone"):
        swept(of=beside(Picky), with_=["picky"])


def test_the_catalogue_is_swept_as_far_as_asked() -> None:
    found = swept(of=known(), depth=8, width=4, limit=300)
    assert found.asked == 300
    assert found.ranked[0].prediction.time.step_s == pytest.approx(0.114, rel=0.05), "as the recipe"
    rows = table(found, 3)
    assert all(len(row) == len(HEAD) for row in rows)
    assert rows[-1][-1] == "(the plan as it is)" and rows[0][3].startswith("+")
    assert plain(found, 3)["ranked"][0]["changes"] == list(found.ranked[0].changes)
    best = found.ranked[0]
    assert changed(found.start.plan, best.changes, known()) == best.plan


def test_a_narrow_terminal_shows_every_change_whole(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    narrow = partial(Console, force_terminal=True, width=80, color_system=None)
    monkeypatch.setattr("headrace.cli.terminal.Console", narrow)
    words = "techniques.bf16_parameters.master=8bit_that_is_long"
    cells = ["8.77 ms", "467k", "+82.4%", "3 min, $1.30", "172.1 MiB", "tightly"]
    show_table(HEAD, [["1", *cells, words], ["2", *["-"] * 6, "+quick +rival"]])
    shown = capsys.readouterr().out
    assert "\u2026" not in shown and max(map(len, shown.splitlines())) <= 80
    column = [line[shown.index("changes") :] for line in shown.splitlines()[1:]]
    assert "".join("".join(column).split()).startswith(words)
    monkeypatch.undo()  # and a file has a line for each row
    show_table(HEAD, [["1", *cells, words * 9], ["2", *["-"] * 6, "+quick +rival"]])
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["rank", "1", "2"]


def test_the_first_rank_has_a_command_that_makes_it() -> None:
    of, given = beside(Rival, Quick), ["batch.micro_sequences=2", "name=a"]
    found = swept(*given, of=of, with_=["cudnn_attention"], depth=3)
    said = command(found, "my plan.toml", given, ["cudnn_attention"], ["z_loss"])
    verb, name, *words = shlex.split(said)[1:]
    assert (verb, name) == ("train", "my plan.toml") and "--with cudnn_attention" not in said
    pairs = list(pairwise(words))
    plan = Plan.read(
        SHAPE.partition("[techniques")[0],
        of,
        overrides=[w for w in words if "=" in w],
        with_=[b for a, b in pairs if a == "--with"],
        without=[b for a, b in pairs if a == "--without"],
    )
    assert plan == found.ranked[0].plan and plan != found.start.plan
    full = replace(found, ranked=[found.start])
    assert command(full, "demo", [], [], []) == "headrace train demo"
    pair = found.start.plan.replaced(mesh=found.start.plan.mesh.model_copy(update={"data": 2}))
    two = replace(found, ranked=[replace(found.start, plan=pair)])
    words = ["torchrun", "--nproc-per-node", "2", "-m", "headrace", "train", "demo"]
    assert command(two, "demo", [], [], []).split() == words
    seen = found.start.prediction
    seen = replace(seen, memory=replace(seen.memory, fits="no"))
    full = replace(found, ranked=[replace(found.start, prediction=seen)])
    assert command(full, "demo", [], [], []) == ""
    assert command(replace(found, ranked=[]), "demo", ["name=a"], [], []).split()[1] == "tune"


@pytest.mark.parametrize(
    ("ranks", "linked", "begin"),
    [
        (4, True, "torchrun --nproc-per-node 4 -m headrace train demo name=a --with z_loss"),
        (4, False, "torchrun --nproc-per-node 4 -m headrace probe"),
        (16, False, "torchrun --nnodes 2 --nproc-per-node 8 ... -m headrace probe"),
    ],
)
def test_without_a_time_several_ranks_are_not_sent_to_the_tuner(
    ranks: int, linked: bool, begin: str
) -> None:
    found = swept(of=beside(), depth=1)
    plan = found.start.plan
    plan = plan.replaced(mesh=plan.mesh.model_copy(update={"data": ranks}))
    none = replace(found, ranked=[], start=replace(found.start, plan=plan), linked=linked)
    assert command(none, "demo", ["name=a"], ["z_loss"], []) == begin


def test_a_sweep_for_money_says_that_it_has_no_price() -> None:
    def said(*overrides: str, aim: str) -> int:
        found = swept(*overrides, of=beside(), aim=aim, depth=1)
        return format_summary(found).count("hardware.dollars_per_hour=PRICE")

    assert said(aim="money") == 1 and said(aim="time") == 0
    assert said("hardware.dollars_per_hour=3", aim="money") == 0


def test_plans_that_were_measured_are_ranked_as_they_were() -> None:
    seen: dict[str, dict[str, tuple[float, list[float]]]] = defaultdict(dict)
    for what, plan, context, metrics in measured():
        on = plan.techniques.values()
        if any(not t.timed or t.equality == "learning" for t in on):
            continue
        try:
            ledger = make_ledger(plan, context)
            time = step_time(ledger.work, H200, ledger.sizes["micro_batches"])
        except UnsupportedError:  # no time is predicted
            continue
        seconds = plan.batch.tokens / metrics["tokens_per_s"]["value"]
        _, took = seen[what.split()[1]].setdefault(plan.to_toml(), (time.step_s, []))
        took.append(seconds)
    assert set(seen) == {"160m", "1b"}
    for rows in seen.values():
        foreseen = [step_s for step_s, _ in rows.values()]
        took = [mean(blocks) for _, blocks in rows.values()]
        assert len(took) > 25
        assert kendall_tau(foreseen, took) > 0.9 and regret(foreseen, took) < 0.02


def test_changes_are_the_difference_of_two_plans() -> None:
    plan = Plan.read(SHAPE, known())
    words = (
        "-bf16_parameters",
        "+fp16_loss_scaling",
        "+full_checkpoint",
        "batch.micro_sequences=4",
        "model.precision=fp16",
        "techniques.full_checkpoint.every=2",
        "techniques.torch_compile.scope=block",
    )
    other = changed(plan, reversed(words), known())
    assert other.techniques["full_checkpoint"].every == 2  # type: ignore[attr-defined]
    assert difference(plan, other) == words
    assert difference(other, changed(other, difference(other, plan), known())) == difference(
        other, plan
    )
    assert difference(plan, changed(plan, ["+gqa"], known())) == ("+gqa",), "and no model.kv_heads"
    grouped = changed(plan, ["+gqa", "techniques.gqa.queries_per_key=4"], known())
    assert grouped.model.kv_heads == 3
    assert changed(grouped, ["-gqa"], known()).model.kv_heads == 0
    assert parse(words).command()[-2:] == ["--without", "bf16_parameters"]

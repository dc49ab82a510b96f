"""Ablations of a plan on a clock that is made up, and one on a real one."""

import json
import math
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from tiny import READ

from headrace.cli.catalogue import catalogue
from headrace.core.command import typed
from headrace.core.errors import ConfigError, RefusalKind, UnsupportedError
from headrace.core.progress import Progress
from headrace.core.statistics import Interval
from headrace.plan.plan import Plan
from headrace.tuner import ablate, ablation
from headrace.tuner.ablate import FILE, ablate_command
from headrace.tuner.ablation import Ablation, trials_of
from headrace.tuner.command import locked
from headrace.tuner.interplay import ADDED, LEFT_OUT, PAIR, TABLE, ratio_of, stand
from headrace.tuner.paired_blocks import SampleSize
from headrace.tuner.readings import Reading

THREE = ("selective_checkpoint", "chunked_cross_entropy", "z_loss")
CHUNKED = "[techniques.chunked_cross_entropy]\nchunk_tokens = 8\n"
Seconds = Callable[[frozenset[str]], float]


@pytest.fixture
def text(corpus: Path, prepared_folder: Path) -> str:
    """Return the text of a plan with three techniques."""
    plain = READ.format(corpus=corpus, prepared=prepared_folder)
    return f"{plain}[techniques.{THREE[0]}]\n{CHUNKED}[techniques.{THREE[2]}]\n"


class Made:
    """Readings of a step that takes `seconds` of the techniques that are on; memory likewise."""

    def __init__(self, seconds: Seconds, *, noise: float = 1e-3, fail: Any = None) -> None:
        self.seconds, self.noise, self.fail = seconds, noise, fail
        self.asked: list[tuple[set[str], set[str]]] = []

    def __call__(self, first: Plan, second: Plan, **how: Any) -> Reading:
        self.asked.append((set(first.techniques), set(second.techniques)))
        if self.fail and (found := self.fail(len(self.asked), set(second.techniques))):
            return found
        one, two = self._of(first, self.noise), self._of(second, -self.noise)
        two.beside, two.steps = one, how["size"].timed
        return two

    def _of(self, plan: Plan, noise: float) -> Reading:
        names = frozenset(plan.techniques)
        step_s = self.seconds(names)
        held = 2.0**30 * (0.5 if "selective_checkpoint" in names else 1)
        seconds = [step_s * (1 + noise * k) for k in (0, 1, -1, 0)]
        return Reading(seconds, held, losses=[2.0] * 8, evidence=dict.fromkeys(names, "seen"))


def product(names: frozenset[str]) -> float:
    """Gains that multiply: 25%, -20% and none."""
    factors = {"chunked_cross_entropy": 0.8, "selective_checkpoint": 1.25, "z_loss": 1.0}
    return math.prod(factors[n] for n in names)


@pytest.fixture
def run(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ablation]:
    """Return a function that runs an ablation on a made-up clock."""

    def go(made: Made, **how: Any) -> Ablation:
        monkeypatch.setattr(ablate, "measure_with", lambda worker: made)
        monkeypatch.setattr(ablate, "train_steps", lambda plan, steps, **_: Reading(losses=[2.0]))
        given = {"folder": tmp_path, "in_process": True, **how}
        plan = Plan.read(given.pop("text", text), catalogue(), overrides=given.pop("set", ()))
        return ablate_command(plan, catalogue=catalogue(), **given)

    return go


def test_what_is_left_out_and_what_is_added_have_the_gains_of_the_clock(
    run: Callable[..., Ablation], tmp_path: Path
) -> None:
    found = run(Made(product), pairs=True)
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    assert [r["measurement"] for r in rows] == [LEFT_OUT] * 3 + [ADDED] * 3 + [PAIR] * 3
    for kind, base in ((LEFT_OUT, "recipe"), (ADDED, "trunk")):
        for name, gain in zip(THREE, (0.8, 1.25, 1.0), strict=True):
            row = found.of(kind)[name]
            told = row["metrics"]["speed_ratio"]
            right = 1 / gain if kind == LEFT_OUT else gain
            assert told["value"] == pytest.approx(right) and told["low"] < right < told["high"]
            assert row["base"] == base and row["n"] == 4 and row["evidence"] == {name: "seen"}
            ratio = ratio_of(row)
            assert ratio is not None and ratio.holds(gain)
    whole, one = rows[0]["baseline_sha256"], rows[0]["plan_sha256"]
    assert {r["baseline_sha256"] for r in rows[:3]} == {whole} != {one}
    assert found.of(LEFT_OUT)["selective_checkpoint"]["metrics"]["memory_ratio"]["value"] == 2
    ((_, _, singles), (_, _, pairs)) = found.tables()
    cells = {row[0]: row for row in singles}
    assert cells["selective_checkpoint"][1].startswith("-20.0% (")
    assert cells["selective_checkpoint"][2:3] == ["-50.0%"]
    assert cells["selective_checkpoint"][4] == "slower, less memory"
    assert cells["chunked_cross_entropy"][4] == "faster"
    assert cells["z_loss"][4] == "learns otherwise"
    assert {row[-1] for row in pairs} == {"adds"}
    (advice, where) = found.lines()
    assert "50% less memory" in advice and where == f"rows: {tmp_path / FILE}"
    json.dumps(found.to_dict(), allow_nan=False)


def test_an_ablation_goes_on_where_it_was_ended(
    run: Callable[..., Ablation], tmp_path: Path, text: str
) -> None:
    def stop(times: int, names: set[str]) -> None:
        if times == 3:
            raise KeyboardInterrupt

    first = run(Made(product, fail=stop))
    assert first.interrupted and len(first.rows) == 2
    assert first.left == ["without z_loss", *(f"only {name}" for name in THREE)]
    assert "the same command goes on: without z_loss" in first.lines()[-2]
    with (tmp_path / FILE).open("ab") as file:
        file.write(b'"x"\n\xff\xfe\n{"measurement": "left_out", "refused": 7}\n')  # damaged
        file.write(b'{"measurement": "le')  # a kill in the middle of a line
    rest = Made(product)
    second = run(rest)
    assert len(rest.asked) == 4 and not second.left and len(second.rows) == 6
    again = Made(product)
    assert run(again).rows == second.rows and not again.asked
    for other in ({"set": ["model.dim=64"]}, {"size": SampleSize(1, 1, 1)}, {"loss_steps": 1}):
        again = Made(product)
        run(again, **other)
        assert len(again.asked) == 6, other


def test_time_that_is_up_names_what_is_left(
    run: Callable[..., Ablation], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(ablate.time, "monotonic", lambda: now[0])

    def takes(times: int, names: set[str]) -> None:
        now[0] += 60

    none = Made(product, fail=takes)
    found = run(none, minutes=0.0)
    assert not found.rows and len(found.left) == 6
    few = Made(product, fail=takes)
    found = run(few, minutes=2.4)  # half of a third would end after it
    assert len(few.asked) == len(found.rows) == 2
    assert found.left[0] == "without z_loss" and len(found.left) == 4


def test_a_folder_in_use_or_not_to_be_written_is_told_before_anything_is_measured(
    run: Callable[..., Ablation], tmp_path: Path
) -> None:
    made, file = Made(product), tmp_path / "file"
    file.touch()
    with pytest.raises(ConfigError, match="file cannot be written") as told:
        run(made, folder=file)
    assert told.value.remedy.text.startswith("--out ")
    other = locked(tmp_path, "", "")
    with (
        pytest.raises(ConfigError, match="another process measures") as told,
        typed(["ablate", "demo", "--pairs", "--out", "here", "seed=3", "--json"], ("--out",)),
    ):
        run(made)
    begins = "headrace ablate demo --pairs seed=3 --out FOLDER (or "
    assert told.value.remedy.text.startswith(begins)
    other.unlock()
    assert not made.asked and run(made).rows


def test_what_cannot_run_says_why_and_what_was_cut_is_measured_again(
    run: Callable[..., Ablation], tmp_path: Path
) -> None:
    def fail(times: int, names: set[str]) -> Reading | None:
        if "selective_checkpoint" not in names:
            return Reading(refused="out of memory: 8 GiB", refusal=RefusalKind.MEMORY)
        late = Reading(refused="not done within 9 s", refusal=RefusalKind.TIME)
        return late if names == {*THREE} - {"z_loss"} else None

    found = run(Made(product, fail=fail), pairs=True)
    row = found.of(LEFT_OUT)["selective_checkpoint"]
    assert row["refused"] == "out of memory: 8 GiB" and not row["metrics"] and row["n"] == 0
    cut = "selective_checkpoint + chunked_cross_entropy"
    assert found.left == ["without z_loss", f"only {cut}"]
    said = {p.names: p for p in found.pairs()}
    assert said["selective_checkpoint", "z_loss"].why == "z_loss alone: out of memory: 8 GiB"
    again = Made(product)
    assert not run(again, pairs=True).left
    assert again.asked == [({*THREE}, {*THREE[:2]}), (set(), {*THREE[:2]})]


def test_plans_that_cannot_be_have_a_row_and_take_no_time(
    run: Callable[..., Ablation], text: str, tmp_path: Path
) -> None:
    needs = text.replace("[data]", "[mesh]\ndata = 2\n[data]")
    with pytest.raises(ConfigError, match="one device"):
        run(Made(product), text=needs)
    bare = text[: text.index("[techniques")]
    with pytest.raises(ConfigError, match="no techniques"):
        run(Made(product), text=bare)
    made = Made(lambda names: 1.0)
    for name, error, says in (
        ("cuda_graphs", UnsupportedError, "CUDA"),
        ("full_checkpoint", ConfigError, "selective_checkpoint"),
    ):
        with pytest.raises(error, match=says) as told:
            run(made, text=f"{text}[techniques.{name}]\n")
        assert f"--without {name}" in told.value.remedy.text
    assert not made.asked and not (tmp_path / FILE).exists()
    one = Made(product)
    found = run(one, text=bare + CHUNKED)
    assert len(one.asked) == 1 and list(found.rows) == [(LEFT_OUT, ("chunked_cross_entropy",))]


def test_a_side_that_cannot_run_is_told_whole_with_its_remedy(
    run: Callable[..., Ablation], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Below the table, whose cells have no room for it; a plan with all three can run."""
    asked = ablation.check_supported
    why = f"{THREE[1]} was asked for and cannot run here: {'a long reason ' * 9}ends here"

    def check(techniques: list[Any], context: Any) -> None:
        if [t.name() for t in techniques] == [THREE[1]]:
            raise UnsupportedError(why, f"--with {THREE[2]}")
        asked(techniques, context)

    monkeypatch.setattr(ablation, "check_supported", check)
    found = run(Made(product))
    assert f"only {THREE[1]}: {why}; try: --with {THREE[2]}" in found.lines()
    (_, _, rows), *_ = found.tables()
    cells = {row[0]: row for row in rows}
    assert cells[THREE[1]][3] == "refused: see below" and "%" in cells[THREE[1]][1]


def test_columns_that_hold_nothing_are_left_out_and_say_why(
    run: Callable[..., Ablation], text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = Made(product)
    uncounted = Made(product)
    of = uncounted._of
    monkeypatch.setattr(uncounted, "_of", lambda *given: replace(of(*given), peak_bytes=None))
    one = text[: text.index("[techniques")] + CHUNKED
    (_, head, rows), *_ = run(uncounted, text=one).tables()
    assert head == ("technique", "gain in the plan", "says") and all(rows[0])
    memory, alone, where = run(counts, text=one).lines()
    assert "on a CPU" in memory and "no other technique" in alone and where.startswith("rows:")
    assert run(Made(product)).tables()[0][1] == TABLE


def test_keys_that_a_technique_rewrites_go_with_it(text: str) -> None:
    resolved = Plan.read(text, catalogue(), with_=["tied_embeddings"]).to_toml()
    trials = trials_of(Plan.read(resolved, catalogue()), catalogue(), pairs=False)
    assert len(trials) == 8
    for trial in trials:
        assert trial.side is not None and not trial.refused
        tied = "tied_embeddings" in trial.side.techniques
        assert trial.side.model.tied_embeddings == tied


def _row(low: float, value: float, high: float) -> dict[str, Any]:
    told = {"low": low, "value": value, "high": high}
    return {"measurement": ADDED, "n": 4, "metrics": {"speed_ratio": told}}


@pytest.mark.parametrize(
    ("one", "two", "both", "says"),
    [
        (1.1, 1.2, 1.32, "adds"),
        (1.1, 1.2, 1.5, "helps"),
        (1.1, 1.2, 1.21, "cancels"),
        (1.1, 1.2, 1.1, "conflicts"),
        (0.5, 0.5, 0.2, "cancels"),  # neither gains, so none is slower than a gain
        (0.8, 1.25, 1.0, "adds"),
    ],
)
def test_pairs_are_judged_by_what_their_product_misses(
    one: float, two: float, both: float, says: str
) -> None:
    def near(value: float, share: float) -> dict[str, Any]:
        return _row(value / (1 + share), value, value * (1 + share))

    alone = near(one, 0.004), near(two, 0.004)
    found = stand(near(both, 0.004), *alone, ("a", "b"))
    assert found.says == says
    wide = 0.05 + 2 * abs(math.log(both / (one * two)))
    assert stand(near(both, wide), *alone, ("a", "b")).says == "undecided"
    assert isinstance(found.alone, Interval) and found.alone.holds(one * two)


def test_rows_say_how_the_plan_differs_from_its_file(
    run: Callable[..., Ablation], tmp_path: Path
) -> None:
    """Else a page takes them for the file's own."""
    run(Made(product), changes=["-muon", "batch.tokens=512"])
    rows = [json.loads(line) for line in (tmp_path / FILE).read_text().splitlines()]
    told = {row["base"]: row["overrides"] for row in rows}
    assert told == {"recipe": ["-muon", "batch.tokens=512"], "trunk": ["batch.tokens=512"]}


def test_a_tiny_plan_on_a_real_clock(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    notes: list[str] = []
    progress = Progress()
    monkeypatch.setattr(progress, "note", notes.append)
    plan = Plan.read(text, catalogue(), without=["selective_checkpoint", "z_loss"])
    found = ablate_command(
        plan,
        catalogue=catalogue(),
        folder=tmp_path,
        in_process=True,
        loss_steps=2,
        size=SampleSize(1, 1, 1),
        progress=progress,
    )
    (((kind, (name,)), row),) = found.rows.items()
    assert (kind, name) == (LEFT_OUT, "chunked_cross_entropy") and len(notes) == 2
    assert not found.left and not row.get("refused") and not row["different"]
    assert row["metrics"]["speed_ratio"]["value"] > 0 and name in row["evidence"]
    assert abs(row["metrics"]["loss_difference"]["value"]) < 1e-5

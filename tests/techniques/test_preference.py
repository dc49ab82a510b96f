"""The technique `preference`: a mean over pairs of a loss of whole answers."""

import json
import math
import os
import random
import shutil
import signal
from contextlib import nullcontext
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from scaled import Here, digests
from tiny import WORDS
from torch import Tensor

from headrace.assemble import references
from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.catalogue import catalogue
from headrace.core.errors import ConfigError, Diverged, Stopped
from headrace.core.files import hold_lock
from headrace.core.progress import Progress
from headrace.data import parts
from headrace.data.ingest import prepare
from headrace.data.loader import Micro, collate, validation_batches
from headrace.data.packing.pairs import PairRows
from headrace.data.rows import CHOSEN, IGNORE, REJECTED
from headrace.data.scale.job import ingest_on
from headrace.data.tokenizer import train_tokenizer
from headrace.inference.load import open_model
from headrace.model.lora import without_adapters
from headrace.model.preference_loss import Answers, LossName
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.report.single import write_report
from headrace.train import train
from headrace.train.evaluate import evaluate
from headrace.train.run_folder import RunFolder
from headrace.train.train import step

FUNCTIONS = Path(__file__).with_name("preference_ranks.py")
TURN = {"role": "user", "content": "the mill"}


def _row(rng: random.Random, number: int) -> dict[str, Any]:
    """Return a pair whose prompt is a text, messages, or the beginning of both conversations."""

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    def answer(text: str) -> dict[str, str]:
        return {"role": "assistant", "content": text}

    ask, both = words(6), [f"{words(5)} lock", f"{words(5)} weir"]
    if number % 3 == 0:
        return {"prompt": ask, "chosen": both[0], "rejected": both[1]}
    turns = [{"role": "user", "content": ask}]
    if number % 3 == 1:
        begun = [*turns, answer(words(3)), TURN]
        return dict(zip(("chosen", "rejected"), ([*begun, answer(t)] for t in both), strict=True))
    return {"prompt": turns, "chosen": [answer(both[0])], "rejected": [answer(both[1])]}


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer and 60 pairs, and two more that cannot be trained on."""
    folder, rng = tmp_path_factory.mktemp("pairs"), random.Random(3)
    rows = [_row(rng, number) for number in range(60)]
    rows.append({"prompt": "the", "chosen": "mill", "rejected": "mill"})
    rows.append({"prompt": "the", "chosen": "mill " * 200, "rejected": "gate"})
    (folder / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    special = ("<|im_start|>", "<|im_end|>", "user", "assistant")
    tokenizer = train_tokenizer(
        [" ".join(WORDS)] * 9, vocab=400, special_tokens=special, special_from_text=True
    )
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer" / "tokenizer.json")
    return folder


def _text(pairs: Path) -> str:
    return f"""
    device = "cpu"
    guard = false
    model = {{ dim = 16, layers = 2, heads = 2, ffn = 32, vocab = 400, init_std = 0.3 }}
    goal = {{ steps = 2 }}
    optimizer = {{ clip_norm = 1e9 }}
    batch = {{ tokens = 628, micro_sequences = 2 }}
    eval = {{ every_steps = 2 }}
    [data]
    sources = "{pairs}/pairs.jsonl"
    tokenizer = "{pairs}/tokenizer"
    directory = "{pairs}/data"
    sequence_length = 157
    validation = 0.2
    workers = 0
    [data.chat]
    template = "chatml"
    kind = "preference"
    """


def _plan(pairs: Path, *words: str, with_: tuple[str, ...] = ()) -> Plan:
    return Plan.read(_text(pairs), catalogue(), overrides=words, with_=["preference", *with_])


def _build(plan: Plan) -> Build:
    return make_build(plan, prepare(plan), World(), torch.device(plan.device))


def _alone(build: Build, ids: Tensor, targets: Tensor) -> Tensor:
    """Return the summed log-probability of one conversation's answer, on its own."""
    zeros = torch.zeros_like(ids)
    positions = torch.arange(ids.numel())[None]
    work = build.place(build, Micro(ids[None], targets[None], zeros[None].int(), positions))
    hidden_BTD = build.model.hidden(work.ids_BT, work.rows)
    weight = build.model.head.weight  # embeddings are not tied
    logs = (hidden_BTD[0] @ weight.t()).float().log_softmax(-1)
    kept = targets != IGNORE
    return logs[kept].gather(1, targets[kept][:, None]).sum()


def _documents(micro: Micro) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens and targets of each document of each row, padding left out."""
    assert micro.segments_BT is not None
    found = []
    for ids, targets, segments in zip(
        micro.ids_BT, micro.targets_BT, micro.segments_BT, strict=True
    ):
        own = [(ids[segments == n], targets[segments == n]) for n in range(int(segments.max()) + 1)]
        found += [one for one in own if (one[1] != IGNORE).any()]
    return found


def _by_hand(build: Build, micros: list[Micro], name: LossName) -> tuple[Tensor, int]:
    """Return the mean loss over a step's pairs, each conversation computed alone, and their number.

    The reference is the model without its adapters, which are none at first.
    """
    loss = build.notes["preference"].loss
    sides = []
    for ids, targets in [one for micro in micros for one in _documents(micro)]:
        with torch.no_grad(), without_adapters(build.model):
            before = _alone(build, ids, targets)
        before = before if name in ("dpo", "ipo") else torch.zeros(())
        tokens = (targets != IGNORE).sum().float()
        sides.append(Answers(_alone(build, ids, targets), tokens, before))
    compared = [loss(*both).loss for both in zip(sides[::2], sides[1::2], strict=True)]
    return torch.stack(compared).mean(), len(compared)


WAYS = {
    "dpo": (),
    "ipo": (),
    "simpo in chunks": ("chunked_cross_entropy",),
    "orpo in chunks": ("chunked_cross_entropy",),
    "dpo compiled": ("torch_compile",),
}


@pytest.mark.parametrize(
    "way", [pytest.param(w, marks=pytest.mark.slow if "compiled" in w else ()) for w in WAYS]
)
def test_a_step_is_the_mean_over_pairs_of_answers_alone(pairs: Path, way: str) -> None:
    """Compare the loss and every adapter's gradient, in micro-batches of unequal pairs."""
    name: LossName = way.split()[0]  # type: ignore[assignment]
    words = [f"techniques.preference.loss={name}", "techniques.lora.rank=2"]
    words += ["techniques.chunked_cross_entropy.chunk_tokens=61"] * ("chunks" in way)
    words += ["techniques.torch_compile.backend=aot_eager"] * ("compiled" in way)
    build = _build(_plan(pairs, *words, with_=("lora", *WAYS[way])))
    alone = _build(_plan(pairs, *words[:2], with_=("lora",)))
    random_b = torch.Generator().manual_seed(1)
    for key, parameter in alone.model.named_parameters():
        if key.endswith(".lora_b"):  # a policy that has left its base
            parameter.data.normal_(generator=random_b, std=0.3)
            build.model.get_parameter(key).data.copy_(parameter.data)
    micros = build.loader.step().micros
    expected, count = _by_hand(alone, micros, name)
    learned = [p for p in alone.model.parameters() if p.requires_grad]
    wanted = torch.autograd.grad(expected, learned)
    trained = {n: p for n, p in build.model.named_parameters() if p.requires_grad}
    gradients: dict[str, Tensor] = {}

    def keep(build: Build, *_: Tensor) -> bool:
        gradients.update({n: p.grad.clone() for n, p in trained.items() if p.grad is not None})
        return False

    numbers = step(build, micros, 0, keep).tolist()
    assert len(micros) == 2 and count > 6
    assert numbers[0] == pytest.approx(float(expected.detach()), rel=1e-5)
    for (key, gradient), own in zip(gradients.items(), wanted, strict=True):
        assert (gradient - own).norm() < 1e-5 * own.norm(), key
    evidence = build.techniques[[t.name() for t in build.techniques].index("preference")]
    proof = evidence.active(build)
    assert proof.active and proof.numbers["pairs"] == count
    assert numbers[4:] == pytest.approx(
        [proof.numbers["reward_margin"], proof.numbers["ranked_right"]]
    )
    assert 0 < proof.numbers["ranked_right"] < 1


@pytest.mark.parametrize("head", ["whole", "in chunks"])
def test_held_out_pairs_are_compared_by_each_validation(pairs: Path, head: str) -> None:
    """The numbers are those of each held-out conversation computed alone."""
    words = ["techniques.lora.rank=2", "techniques.preference.loss=ipo"]
    with_ = ("lora",)
    if head == "in chunks":
        with_ = (*with_, "chunked_cross_entropy")
        words.append("techniques.chunked_cross_entropy.chunk_tokens=61")
    build = _build(_plan(pairs, *words, with_=with_))
    assert evaluate(build).more["reward_margin"] == 0, "it is its own reference"
    random_b = torch.Generator().manual_seed(1)
    for name, parameter in build.model.named_parameters():
        if name.endswith(".lora_b"):
            parameter.data.normal_(generator=random_b, std=0.3)
    packer = PairRows([build.prepared.validation], 157)
    rows = [packer.row(0, unit) for unit in range(packer.units[0])]
    with torch.no_grad():
        loss, count = _by_hand(build, [collate(rows, segments=True)], "ipo")
        found = evaluate(build).more
        documents = _documents(collate(rows, segments=True))
        now = torch.stack([_alone(build, *one) for one in documents])
        with without_adapters(build.model):
            was = torch.stack([_alone(build, *one) for one in documents])
    ratios = now - was
    apart = 0.1 * (ratios[::2] - ratios[1::2])
    assert found["pairs"] == count == packer.pairs > 8
    assert found["pair_loss"] == pytest.approx(float(loss), rel=1e-4)
    assert found["reward_margin"] == pytest.approx(float(apart.mean()), rel=1e-4)
    assert found["ranked_right"] == pytest.approx(float((apart > 0).float().mean()))
    likelier = float((now[::2] > now[1::2]).float().mean())
    assert found["chosen_likelier"] == pytest.approx(likelier)
    some = evaluate(build, 157).more
    assert 0 < some["pairs"] < count


def test_rows_hold_whole_pairs_and_the_rest_is_counted(pairs: Path) -> None:
    """Each pair's documents follow each other in one row, and count their last answers alone."""
    prepared = prepare(_plan(pairs))
    packer = PairRows(prepared.train, 157)
    assert prepared.chat is not None
    counts = prepared.chat.counts
    (train,) = prepared.train
    held_out = prepared.validation.documents // 2
    assert (counts.pairs, counts.equal_pairs) == (61, 1)
    assert train.documents == 2 * (packer.pairs + packer.too_long)
    assert packer.pairs + packer.too_long + held_out == 61
    decode, seen = prepared.tokenizer.decode, set[int]()
    for unit in range(packer.units[0]):
        row, documents = packer.row(0, unit), packer.documents(0, unit)
        assert row.targets is not None and row.numbers is not None
        assert row.numbers["documents"][: len(documents)].tolist() == documents.tolist()
        for place, document in enumerate(documents.tolist()):
            begin, end = row.starts[place : place + 2].tolist()
            ends = "lock" if document % 2 == 0 else "weir"
            kept = row.targets[begin:end]
            answer = decode(kept[kept != IGNORE].tolist())
            assert answer.endswith(f"{ends}<|im_end|>\n") and "<|im_start|>" not in answer
            assert documents[place ^ 1] == document ^ 1
            seen.add(document)
    assert len(seen) == 2 * packer.pairs
    (line,) = [line for line in prepared.chat.lines() if "left out" in line]
    assert line == "left out: 1 pair of two equal answers"
    with pytest.raises(ConfigError, match="no preference pair of") as refused:
        PairRows(prepared.train, 8)
    key, _, length = refused.value.remedy.text.partition("=")
    assert key == "data.sequence_length" and not PairRows(prepared.train, int(length)).too_long


def test_without_adapters_answers_are_read_before_the_first_step(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are kept beside the shards, used by a resume, and a changed file is refused.

    A general text is opened once, and has no pairs.
    """
    opened = list[Plan]()
    monkeypatch.setattr(
        "headrace.train.general.prepare",
        lambda plan, **how: opened.append(plan) or prepare(plan, **how),
    )
    (tmp_path / "general.txt").write_text(" ".join(WORDS * 40))
    words = [f"directory={tmp_path}", "goal.steps=4", "checkpoint.every_steps=2"]
    words += [f"eval.general={tmp_path}/general.txt"]
    plan = _plan(pairs, *words, "optimizer.lr=0.01", "eval.before=true")
    folder = train.run(plan).folder
    report = RunFolder(folder).read("report")
    assert report is not None and report["before"]["ranked_right"] == 0
    assert 0 < report["before"]["chosen_likelier"] < 1
    assert report["general"]["after_nats"] > 0 and len(opened) == 1
    last = report["val"][-1]
    assert last["pair_loss"] < report["before"]["pair_loss"] == pytest.approx(math.log(2))
    assert last["ranked_right"] > 0.5 and last["reward_margin"] > 0
    page = write_report(folder).read_text()
    assert "Held-out pairs" in page and f"{last['pairs']:.0f} pairs" in page
    assert report is not None and "read once" in report["techniques"]["preference"]["detail"]
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert lines[0]["loss"] == pytest.approx(0.693147, abs=1e-4), "it is its own reference"
    assert lines[0]["reward_margin"] == pytest.approx(0, abs=1e-5)
    assert lines[-1]["ranked_right"] > 0.5 and lines[-1]["reward_margin"] > 0
    assert lines[-1]["val_ranked_right"] == last["ranked_right"]
    more = evaluate(open_model(folder, catalogue(), checkpoint="latest", with_data=True)).more
    assert more == {name: last[name] for name in ("pairs", "chosen_likelier")}, "no reference"
    (kept,) = prepare(plan).directory.glob("reference-*.safetensors")
    again = train.run(plan, resume=True, checkpoint="step-2").folder
    repeated = [json.loads(line) for line in (again / "metrics.jsonl").read_text().splitlines()]
    assert [line["loss"] for line in repeated] == [line["loss"] for line in lines]
    raw = bytearray(kept.read_bytes())
    raw[-1] ^= 1
    kept.write_bytes(raw)
    with pytest.raises(ConfigError, match="has changed"):
        train.run(plan, resume=True, checkpoint="step-2")
    kept.unlink()
    with pytest.raises(ConfigError, match="is gone"):
        train.run(plan, resume=True, checkpoint="step-2")


def test_an_interrupted_reading_goes_on(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was read before a signal is kept, bit for bit; longer rows have the rest read alone."""
    take, calls = references._Reading._take, list[int]()

    def reading(plan: Plan, *, signal_at: int | None = None) -> tuple[Path, int, list[str]]:
        """Train, and return the file, how many micro-batches were read, and what was told."""

        def counted(*args: Any) -> None:
            calls.append(1)
            if len(calls) == signal_at:
                os.kill(os.getpid(), signal.SIGTERM)
            take(*args)

        calls.clear()
        progress = Progress()
        with monkeypatch.context() as patch:
            patch.setattr(references._Reading, "_take", counted)
            with pytest.raises(Stopped) if signal_at else nullcontext():
                train.run(plan, progress=progress)
        (file,) = Path(plan.data.directory).rglob("reference-*")
        return file, len(calls), progress.notes

    words = [f"directory={tmp_path}", f"data.directory={tmp_path}/data", "goal.steps=1"]
    plan = _plan(pairs, *words, "batch.micro_sequences=1", "batch.tokens=157")
    file, every, _ = reading(plan)
    kept = file.read_bytes()
    file.unlink()
    file, count, told = reading(plan, signal_at=3)
    assert count == 3 < every and f"reference: 2 of {every} rows are kept" in told[-1]
    file, count, told = reading(plan)
    assert count == every - 2 and any(f"2 of {every} rows were read before" in t for t in told)
    assert file.read_bytes() == kept and reading(plan)[1] == 0
    damaged = bytearray(kept)
    damaged[-1] ^= 1
    file.write_bytes(damaged)
    assert reading(plan)[1] == every and file.read_bytes() == kept
    had = load_file(file)
    longer = ("batch.micro_sequences=1", "data.sequence_length=628", "batch.tokens=628")
    grown, count, _ = reading(_plan(pairs, *words, *longer))
    has, before = load_file(grown), had["is_read"] > 0
    assert grown == file and count == 1 and has["is_read"].all() and not before.all()
    assert torch.equal(has["log_probabilities"][before], had["log_probabilities"][before])


def test_of_two_runs_the_first_writer_wins(pairs: Path, tmp_path: Path) -> None:
    """Both go on with the number in the file, and a writer waits for the one that has the lock."""
    build = _build(_plan(pairs, f"data.directory={tmp_path}"))
    (begin,) = build.begins
    take = references._Reading._take

    def beside(self: Any, *args: Any) -> None:
        if not self.path.exists():  # another run writes while this one reads
            other = references.Known.nothing(len(self.own))
            other.values[:2], other.is_read[:2] = -0.5, 1
            other.keep(self.path)
        take(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(references._Reading, "_take", beside)
        begin(build)
    (file,) = tmp_path.rglob("reference-*.safetensors")
    kept = build.state["preference"]
    assert isinstance(kept, references.References) and kept.kept is not None
    assert kept.kept[:2].tolist() == [-0.5, -0.5] and (kept.kept[2:] < -0.5).any()
    known = references.Known.opened(file, len(kept.kept))
    assert np.array_equal(known.values, kept.kept.numpy()), "what the run trains with"
    lock = hold_lock(file.with_name(f".{file.name}.lock"), wait=True, key="data.directory")
    writer = Thread(target=known.keep, args=(file,))
    writer.start()
    writer.join(0.2)
    assert writer.is_alive()
    lock.release()
    writer.join()


def test_a_reference_that_is_not_finite_is_refused(pairs: Path, tmp_path: Path) -> None:
    """Nothing is kept of it, and the remedy of half precision is full precision."""
    build = _build(_plan(pairs, f"data.directory={tmp_path}"))
    build.model.head.weight.data.fill_(1e38)
    (begin,) = build.begins
    with pytest.raises(Diverged, match="no finite log-probability") as refused:
        begin(build)
    assert refused.value.remedy.text.startswith("model.pretrained=")
    assert not [*tmp_path.rglob("reference-*")]


@pytest.mark.slow
def test_ranks_share_pairs(pairs: Path, tmp_path: Path, zygote: Any) -> None:
    zygote.call(2, tmp_path, FUNCTIONS, "share", ranks=2, text=_text(pairs))


def test_validation_counts_chosen_answers_over_parts_too(
    pairs: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The byte of a rejected answer is another, however shards are made, and no other loss's."""
    monkeypatch.setattr(parts, "PART_BYTES", 1)
    lines = (pairs / "pairs.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "rows").mkdir()
    for number in range(3):
        (tmp_path / "rows" / f"{number}.jsonl").write_text("".join(lines[number::3]))
    plan = _plan(pairs, f"data.sources={tmp_path / 'rows'}", f"data.directory={tmp_path / 'data'}")
    made = ingest_on(plan, Here())
    expected = digests(made)
    shutil.rmtree(made.directory)
    prepared = prepare(plan)
    assert digests(prepared) == expected
    assert prepared.chat is not None and prepared.chat.counts.pairs > 0
    shards = prepared.validation
    kinds = shards.counted(0, shards.tokens)
    assert kinds is not None and {*kinds.tolist()} == {0, CHOSEN, REJECTED}
    targets = torch.cat(
        [
            micro.targets_BT.reshape(-1)
            for micro in validation_batches(shards, 157, tokens=None, micro_rows=1, segments=True)
        ]
    )
    assert int((targets != IGNORE).sum()) == int((kinds == CHOSEN).sum())

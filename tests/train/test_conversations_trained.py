"""Train on conversations: the loss is the plain mean over answers, whoever packs and attends."""

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from tiny import WORDS
from torch import Tensor
from typer.testing import CliRunner

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.cli.app import app
from headrace.cli.catalogue import catalogue
from headrace.data.chat.template import CHATML_TEXT
from headrace.data.ingest import prepare
from headrace.data.loader import Micro
from headrace.data.rows import IGNORE
from headrace.data.tokenizer import train_tokenizer
from headrace.doctor.observation import observe, read_rows
from headrace.model.head import cross_entropy
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.train.train import run, step
from headrace.tuner.readings import flags_of

WAYS = {
    "documents": ["document_packing"],
    "best fit": ["best_fit_packing"],
    "chunked loss": ["best_fit_packing", "chunked_cross_entropy"],
}
"""Techniques that keep conversations of a row apart, and heads beside them."""
BACKENDS = {
    "sdpa": ("fp32", "bf16"),
    "cudnn_attention": ("bf16",),
    "flex_attention": ("fp32", "bf16"),
    "varlen_attention": ("bf16",),
}
"""Attention that takes packed documents on a GPU -> its precisions; flash kernels refuse them."""
SEEN = [
    pytest.param(device, backend, precision, id=f"{device}-{backend}-{precision}", marks=marks)
    for device, marks in (("cpu", []), ("cuda", [pytest.mark.gpu]))
    for backend, precisions in BACKENDS.items()
    for precision in precisions
    if device == "cuda" or backend == "sdpa"
]
TIGHT = 1e-5
"""Relative difference of losses and gradients in fp32, where only the order of sums differs."""
ROUNDING = 3.0
"""How many times further from fp32 a packed step in bf16 may be than one of conversations alone."""


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tokenizer, and conversations of which the loss counts a third."""
    folder, rng = tmp_path_factory.mktemp("talks"), random.Random(3)

    def words(most: int) -> str:
        return " ".join(rng.choices(WORDS, k=rng.randint(1, most)))

    rows = []
    for number in range(60):
        turns = []
        for _ in range(1 + number % 2):
            turns += [{"role": "user", "content": words(6)}]
            turns += [{"role": "assistant", "content": words(5)}]
        rows.append({"messages": turns})
    (folder / "talks.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    special = ("<|im_start|>", "<|im_end|>", "user", "assistant")
    tokenizer = train_tokenizer(
        [" ".join(WORDS)] * 9, vocab=400, special_tokens=special, special_from_text=True
    )
    (folder / "tokenizer").mkdir()
    tokenizer.save(folder / "tokenizer" / "tokenizer.json")
    return folder


def _plan(talks: Path, with_: list[str], *words: str) -> Plan:
    text = f"""
    device = "cpu"
    guard = false
    model = {{ dim = 16, layers = 2, heads = 2, ffn = 32, vocab = 400 }}
    goal = {{ steps = 2 }}
    optimizer = {{ clip_norm = 1e9 }}
    batch = {{ tokens = 512, micro_sequences = 2 }}
    [data]
    sources = "{talks}/talks.jsonl"
    tokenizer = "{talks}/tokenizer"
    directory = "{talks}/data"
    sequence_length = 64
    validation = 0.2
    workers = 0
    [data.chat]
    template = "chatml"
    """
    return Plan.read(text, catalogue(), overrides=words, with_=with_)


def _build(plan: Plan) -> Build:
    return make_build(plan, prepare(plan), World(), torch.device(plan.device))


def _pieces(micro: Micro) -> list[tuple[Tensor, Tensor]]:
    """Return the tokens and targets of each conversation of each row, on its own."""
    assert micro.segments_BT is not None
    pieces = []
    for ids, targets, segments in zip(
        micro.ids_BT, micro.targets_BT, micro.segments_BT, strict=True
    ):
        for number in range(int(segments.max()) + 1):
            own = segments == number
            pieces.append((ids[own][None], targets[own][None]))
    return pieces


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_the_mean_over_the_answers_of_conversations_alone(talks: Path, way: str) -> None:
    """Compare loss and gradients, over micro-batches, with one conversation at a time."""
    chunks = ["techniques.chunked_cross_entropy.chunk_tokens=64"] * ("chunked" in way)
    build = _build(_plan(talks, WAYS[way], *chunks))
    alone = _build(_plan(talks, []))
    batch = build.loader.step()
    pieces = [piece for micro in batch.micros for piece in _pieces(micro)]
    counted = sum(int((targets != IGNORE).sum()) for _, targets in pieces)
    tokens = sum(ids.numel() for ids, _ in pieces)
    assert len(batch.micros) == 4 and len(pieces) > 16 and 0.1 < counted / tokens < 0.5
    scale, nats = torch.tensor(1.0 / counted, device=alone.device), 0.0
    for ids, targets in pieces:
        if (targets != IGNORE).any():
            work = alone.place(alone, Micro(ids, targets))
            nats += float(alone.engine(alone, [work], cross_entropy, scale))
    gradients: dict[str, Tensor] = {}

    def keep(build: Build, *_: Tensor) -> bool:
        named = build.model.named_parameters()
        gradients.update({name: p.grad.clone() for name, p in named if p.grad is not None})
        return False

    loss, _, _, targets = step(build, batch.micros, 0, keep).tolist()
    assert targets == counted
    assert loss == pytest.approx(nats, rel=1e-5)
    for name, parameter in alone.model.named_parameters():
        assert parameter.grad is not None
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-6)


def _step_of(build: Build, micros: list[Micro]) -> tuple[float, dict[str, Tensor]]:
    """Return the loss and every gradient of a step whose update is not applied."""
    gradients: dict[str, Tensor] = {}

    def keep(build: Build, *_: Tensor) -> bool:
        named = build.model.named_parameters()
        gradients.update({n: p.grad.float().clone() for n, p in named if p.grad is not None})
        return False

    with flags_of(build):
        return float(step(build, micros, 0, keep)[0]), gradients


def _far(
    found: tuple[float, dict[str, Tensor]], right: tuple[float, dict[str, Tensor]]
) -> dict[str, float]:
    """Return how far a loss and gradients are from others, relative to these."""
    far = {n: float((g - right[1][n]).norm() / right[1][n].norm()) for n, g in found[1].items()}
    assert far.keys() == right[1].keys()
    return {**far, "loss": abs(found[0] / right[0] - 1)}


def _answers_of(build: Build, micros: list[Micro], document: int) -> float:
    """Return the sum of nats over the answers of one conversation of each row."""
    one, total = torch.ones((), device=build.device), 0.0
    for micro in micros:
        assert micro.segments_BT is not None
        targets = micro.targets_BT.where(micro.segments_BT == document, IGNORE)
        work = build.place(build, replace(micro, targets_BT=targets))
        with torch.no_grad(), flags_of(build):
            total += float(build.engine(build, [work], cross_entropy, one))
    return total


@pytest.mark.parametrize(("device", "backend", "precision"), SEEN)
def test_packed_conversations_are_those_of_rows_alone_on_each_backend(
    talks: Path, device: str, backend: str, precision: str
) -> None:
    """Loss and gradients equal rows of one conversation each; a neighbour moves nothing.

    In fp32 they are equal. In bf16 both are compared with fp32, and packing may add no error.
    """
    words = [f"device={device}", "model.dim=64", "model.ffn=64"]
    own = [] if backend == "sdpa" else [backend]
    low = [*words, f"model.precision={precision}"]
    build = _build(_plan(talks, ["best_fit_packing", *own], *low))
    micros = build.loader.step().micros
    for micro in micros:
        assert micro.segments_BT is not None and micro.positions_BT is not None
        begins = micro.segments_BT.diff(
            dim=1, prepend=torch.full_like(micro.segments_BT, -1)[:, :1]
        )
        assert torch.equal(micro.positions_BT == 0, begins != 0)
        steps = micro.positions_BT.diff(dim=1)
        assert (steps[begins[:, 1:] == 0] == 1).all()
    pieces = [piece for micro in micros for piece in _pieces(micro)]
    alone = [Micro(ids, targets) for ids, targets in pieces]
    assert len(alone) > 2 * sum(len(micro.ids_BT) for micro in micros)
    found = _step_of(build, micros)
    exact = _build(_plan(talks, [], *words, "model.precision=fp32"))
    right = _step_of(exact, alone)
    if precision == "fp32":
        far = _far(found, right)
        assert max(far.values()) < TIGHT, far
    else:
        far = _far(found, right)
        usual = _far(_step_of(_build(_plan(talks, [], *low)), alone), right)
        assert max(usual.values()) < 0.2
        too_far = {n: (far[n], usual[n]) for n in far if far[n] > ROUNDING * max(usual.values())}
        assert not too_far, too_far
    ids = [m.ids_BT.where(m.segments_BT != 0, (m.ids_BT + 1) % 300) for m in micros]
    moved = [replace(m, ids_BT=other) for m, other in zip(micros, ids, strict=True)]
    first, second = (_answers_of(build, micros, n) for n in (0, 1))
    assert _answers_of(build, moved, 0) != first and second > 0
    assert _answers_of(build, moved, 1) == second


def test_a_run_keeps_its_template_and_calls_no_prompt_waste(talks: Path) -> None:
    """The report says what counts, export takes the template along, and padding alone is waste."""
    plan = _plan(talks, ["best_fit_packing"], f"directory={talks}/runs", "name=talks")
    result = run(plan)
    report = json.loads((result.folder / "report.json").read_text())
    counted = report["data"]["chat"]["counted"] / report["data"]["chat"]["tokens"]
    assert report["wasted_token_fraction"] == pytest.approx(1 - counted, abs=0.15)
    assert report["padding_fraction"] < 0.1
    assert (
        observe(report, read_rows(result.folder / "metrics.jsonl")).useful_share
        == 1 - report["padding_fraction"]
    )
    ended = CliRunner().invoke(app, ["export", str(result.folder), "--to", "hf", "--json"])
    assert ended.exit_code == 0, ended.output
    for folder in (result.folder, result.folder / "hf"):
        assert (folder / "chat_template.jinja").read_text() == CHATML_TEXT


def test_the_stream_is_one_whoever_reads_it(talks: Path) -> None:
    """Check that threads change neither the rows nor which targets count."""
    one = _build(_plan(talks, ["best_fit_packing"]))
    threads = _build(_plan(talks, ["best_fit_packing"], "data.workers=2"))
    first, second = one.loader.step().micros, threads.loader.step().micros
    for mine, other in zip(first, second, strict=True):
        assert torch.equal(mine.targets_BT, other.targets_BT)
    assert one.loader.stream_sha256 == threads.loader.stream_sha256
    threads.loader.close()

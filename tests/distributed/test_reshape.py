"""A checkpoint of any layout goes on under any other: one run, moved from mesh to mesh.

The loss of every step, the stream and the last weights are those of a run that one process made.
"""

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny import PLAN, losses, report, tensors

LAYOUTS: dict[str, tuple[int, tuple[str, ...]]] = {
    "alone": (1, ()),
    "replicas": (2, ("mesh.data=2",)),
    "fsdp": (4, ("mesh.data=4", "techniques.fsdp={}")),
    "tp x fsdp": (
        4,
        ("mesh.data=2", "mesh.tensor=2", "techniques.fsdp={}", "techniques.tensor_parallel={}"),
    ),
    "pp x fsdp": (
        4,
        (
            "mesh.data=2",
            "mesh.pipeline=2",
            "techniques.fsdp={}",
            "techniques.pipeline_parallel={}",
            "batch.micro_sequences=1",
        ),
    ),
    "cp x fsdp": (
        4,
        ("mesh.data=2", "mesh.context=2", "techniques.fsdp={}", "techniques.context_parallel={}"),
    ),
    "tp x pp": (
        4,
        (
            "mesh.tensor=2",
            "mesh.pipeline=2",
            "techniques.tensor_parallel={}",
            "techniques.pipeline_parallel={}",
            "batch.micro_sequences=2",
        ),
    ),
    "experts": (4, ("mesh.data=4", "mesh.expert=4", "techniques.expert_parallel={}")),
    "experts x fsdp": (
        4,
        (
            *("mesh.data=4", "mesh.expert=2", "techniques.expert_parallel={}"),
            *("techniques.fsdp={}", "batch.micro_sequences=1"),
        ),
    ),
}
WHOLE_TOKENS = ("mesh.tensor=2", "techniques.tensor_parallel.sequence=false")
LAYOUTS["tp"] = (2, WHOLE_TOKENS)
NARROW = ("techniques.bf16_parameters={}",)
MIXTURE = ("techniques.mixture_of_experts.experts=5",)
SLOW = pytest.mark.slow
MODEL = (
    "model.layers=3",
    "model.tied_embeddings=true",
    "checkpoint.every_steps=2",
    "optimizer.eps=1e-3",  # a sign of a gradient near zero would magnify rounding
)
QUICK = ("cp x fsdp", "tp x pp", "replicas")
"""Layouts in which each axis splits. A kill is quick in train/test_kill.py, under one layout."""
WAYS = [
    ("cp x fsdp", "fsdp", "tp x pp", "replicas", "tp x fsdp"),
    ("fsdp", "tp x fsdp", "pp x fsdp", "alone"),
    ("alone", "cp x fsdp", "tp x pp", "fsdp"),
    ("pp x fsdp", "cp x fsdp", "replicas", "tp x pp", "tp x fsdp"),
    QUICK,
]


@pytest.fixture(scope="module")
def home(
    zygote: Any, tmp_path_factory: pytest.TempPathFactory, corpus: Path, prepared_folder: Path
) -> Path:
    """Make a folder with tiny.toml and the run of one process."""
    cwd = tmp_path_factory.mktemp("reshape")
    (cwd / "tiny.toml").write_text(PLAN.format(corpus=corpus, prepared=prepared_folder))
    ended = zygote.run(cwd, "train", "tiny.toml", "name=whole", *MODEL)
    assert ended.code == 0, ended.err
    return cwd


def train(zygote: Any, home: Path, name: str, layout: str, steps: int, *more: str) -> None:
    """Go on with the run until `steps` under a layout."""
    ranks, keys = LAYOUTS[layout]
    ended = zygote.ranks(
        ranks,
        home,
        "train",
        "tiny.toml",
        f"name={name}",
        f"goal.steps={steps}",
        *MODEL,
        *keys,
        *more,
    )
    assert [e.code for e in ended] == [0] * ranks, (layout, ended[0].err + ended[-1].err)


def assert_the_same_run(one: Path, two: Path) -> None:
    """Compare one stream, one path of the loss, one set of weights, inside of rounding."""
    assert report(one)["stream_sha256"] == report(two)["stream_sha256"]
    torch.testing.assert_close(losses(one), losses(two), rtol=1e-5, atol=1e-5)
    first, second = (tensors(run / "checkpoints" / "latest") for run in (one, two))
    assert first.keys() == second.keys()
    for name, tensor in first.items():
        if not name.startswith("model/"):
            continue
        off = float((tensor - second[name]).abs().max() / tensor.abs().max())
        assert off <= 1e-4, f"{name} is off by {off}"


@pytest.mark.parametrize(
    "way",
    [pytest.param(way, marks=[pytest.mark.slow] * (way is not QUICK)) for way in WAYS],
    ids=" to ".join,
)
def test_a_run_moves_from_layout_to_layout(zygote: Any, home: Path, way: tuple[str, ...]) -> None:
    name = f"way{WAYS.index(way)}"
    ends = [round(12 * (n + 1) / len(way)) for n in range(len(way))]
    for number, (layout, steps) in enumerate(zip(way, ends, strict=True)):
        train(zygote, home, name, layout, steps, *(["--resume"] if number else []))
    assert report(home / "runs" / name)["resumes"] == len(way) - 1
    assert_the_same_run(home / "runs/whole", home / "runs" / name)


@pytest.mark.parametrize(
    "way",
    [
        ("experts", "experts x fsdp", "alone"),
        pytest.param(("experts x fsdp", "experts"), marks=pytest.mark.slow),
    ],
    ids=" to ".join,
)
def test_divided_experts_move(zygote: Any, home: Path, way: tuple[str, ...]) -> None:
    if not (home / "runs/mixture").exists():
        train(zygote, home, "mixture", "alone", 12, *MIXTURE)
    name = f"experts{len(way)}"
    for number, layout in enumerate(way):
        more = ("--resume",) if number else ()
        train(zygote, home, name, layout, 12 * (number + 1) // len(way), *MIXTURE, *more)
    assert_the_same_run(home / "runs/mixture", home / "runs" / name)


@pytest.mark.parametrize(
    ("layout", "keys"),
    [
        ("fsdp", NARROW),
        pytest.param("experts x fsdp", MIXTURE, marks=pytest.mark.slow),
    ],
    ids=["matrices in bf16", "divided experts"],
)
def test_slices_resume_to_the_bit(
    zygote: Any, home: Path, layout: str, keys: tuple[str, ...]
) -> None:
    names = [f"{how}-{layout.replace(' ', '-')}" for how in ("straight", "broken")]
    train(zygote, home, names[0], layout, 12, *keys)
    for steps, more in ((6, ()), (12, ("--resume",))):
        train(zygote, home, names[1], layout, steps, *keys, *more)
    one, two = (home / "runs" / name for name in names)
    assert torch.equal(losses(one), losses(two))
    first, second = (tensors(run / "checkpoints" / "latest") for run in (one, two))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


def test_matrices_in_bf16_move(zygote: Any, home: Path) -> None:
    """Check that slices begin where whole matrices ended, and end where they began at no rate."""
    train(zygote, home, "narrow", "alone", 6, *NARROW)
    before = tensors(home / "runs/narrow/checkpoints/latest")
    still = ("--resume", "--checkpoint", "step-6", "optimizer.lr=1e-30")
    train(zygote, home, "narrow", "fsdp", 8, *NARROW, *still)
    (began,) = [run for run in (home / "runs").iterdir() if run.name.startswith("narrow-")]
    after = tensors(began / "checkpoints/latest")
    kept = [n for n in before if n.startswith("model/") or n.endswith("/rest")]
    assert any(before[name].any() for name in kept if name.endswith("/rest"))
    assert all(torch.equal(before[name], after[name]) for name in kept)


ADAPTERS: dict[str, str] = {
    "lora": "techniques.lora={rank = 3, dropout = 0.5, b_rate = 2.0}",
    "dora": "techniques.dora={rank = 3, dropout = 0.3}",
    "qlora": "techniques.qlora={rank = 3, base = 'int8', train_also = ['head']}",
}


@pytest.fixture(scope="module")
def adapted(zygote: Any, home: Path, corpus: Path, prepared_folder: Path) -> Path:
    """Make a plan that begins with the weights of the run of one process."""
    ended = zygote.run(home, "export", "whole", "--to", "hf", "--output", "base")
    assert ended.code == 0, ended.err
    before, _, after = PLAN.format(corpus=corpus, prepared=prepared_folder).partition("[model]")
    data = after[after.index("[data]") :].replace("vocab = 300", 'tokenizer = "base"')
    (home / "adapted.toml").write_text(f'{before}[model]\npretrained = "base"\n\n{data}')
    return home


def adapt(zygote: Any, home: Path, name: str, layout: str, steps: int, *more: str) -> None:
    """Go on with a run of adapters until `steps` under a layout."""
    ranks, keys = LAYOUTS[layout]
    asked = (f"name={name}", f"goal.steps={steps}", *MODEL[2:], *keys, *more)
    ended = zygote.ranks(ranks, home, "train", "adapted.toml", *asked)
    assert [e.code for e in ended] == [0] * ranks, (layout, ended[0].err + ended[-1].err)


@pytest.mark.parametrize(
    "kind", ["dora", *(pytest.param(k, marks=SLOW) for k in ("lora", "qlora"))]
)
def test_adapters_move_and_leave(zygote: Any, adapted: Path, kind: str) -> None:
    """Ranks that share linears go on where one process ended, and write what it writes."""
    alone, moved = f"{kind}-alone", f"{kind}-moved"
    adapt(zygote, adapted, alone, "alone", 12, ADAPTERS[kind])
    for number, layout in enumerate(("tp x fsdp", "alone", "tp x pp", "tp")):
        more = ("--resume",) if number else ()
        adapt(zygote, adapted, moved, layout, 3 * (number + 1), ADAPTERS[kind], *more)
    runs = adapted / "runs"
    assert_the_same_run(runs / alone, runs / moved)
    written = []
    for name in (alone, moved):
        ended = zygote.run(adapted, "export", name, "--to", "peft", "--output", f"{name}-peft")
        assert ended.code == 0, ended.err
        written.append(load_file(adapted / f"{name}-peft" / "adapter_model.safetensors"))
    assert written[0].keys() == written[1].keys() != set()
    for name, tensor in written[0].items():
        torch.testing.assert_close(written[1][name], tensor, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("kind", [pytest.param("dora", marks=SLOW), "lora"])
def test_adapters_resume_to_the_bit(zygote: Any, adapted: Path, kind: str) -> None:
    names = [f"{kind}-{how}" for how in ("straight", "broken")]
    adapt(zygote, adapted, names[0], "tp", 8, ADAPTERS[kind])
    for steps, more in ((4, ()), (8, ("--resume",))):
        adapt(zygote, adapted, names[1], "tp", steps, ADAPTERS[kind], *more)
    one, two = (adapted / "runs" / name for name in names)
    assert torch.equal(losses(one), losses(two))
    first, second = (tensors(run / "checkpoints" / "latest") for run in (one, two))
    assert all(torch.equal(tensor, second[name]) for name, tensor in first.items())


@pytest.mark.parametrize(
    ("killed", "then"),
    [
        pytest.param("tp x fsdp", "pp x fsdp", marks=pytest.mark.slow),
        pytest.param("pp x fsdp", "alone", marks=pytest.mark.slow),
    ],
)
def test_a_killed_run_goes_on_under_another_layout(
    zygote: Any, home: Path, wait_until: Callable[..., None], killed: str, then: str
) -> None:
    name = f"killed-{killed}".replace(" ", "")
    ranks, keys = LAYOUTS[killed]
    argv = ["train", "tiny.toml", f"name={name}", "goal.steps=100000", *MODEL, *keys]
    children = [zygote.start(home, *argv, env=env) for env in zygote.world(ranks)]
    saved = home / "runs" / name / "checkpoints"
    wait_until(lambda: (saved / "step-4").exists() or (saved / "step-6").exists())
    for child in children:
        os.kill(child.pid, signal.SIGKILL)
    assert {child.wait().code for child in children} == {-9}
    assert int(os.readlink(saved / "latest").removeprefix("step-")) < 12
    train(zygote, home, name, then, 12, "--resume")
    assert_the_same_run(home / "runs/whole", home / "runs" / name)

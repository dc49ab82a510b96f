"""The remedy that is printed of a run that diverged leads, as it stands, to a run that learns."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from headrace.cli.catalogue import catalogue
from headrace.plan.gentler import gentler, usual_rate
from headrace.plan.plan import Plan

TINY = (
    "model={dim = 64, layers = 2, heads = 2}",
    "data.sequence_length=64",
    "data.vocab=512",
    "batch.tokens=512",
    "goal.steps=30",
    "schedule.steps=30",
    "eval={every_steps = 10}",
    "checkpoint.every_steps=0",
    "guard=false",
    "optimizer.lr=4e-3",
)
WILD: dict[str, tuple[str, ...]] = {
    "a rate 1,000 times too high, with warmup": ("optimizer.lr=4", "schedule.warmup_steps=3"),
    "the same in a warmup of the whole run": ("optimizer.lr=4", "schedule.warmup_steps=30"),
    "no warmup": ("optimizer.lr=1",),
    "no number": ("optimizer.lr=1e6", "schedule.warmup_steps=3"),
    "no clipping": ("optimizer.lr=2", "optimizer.clip_norm=0"),
    "a decay that no weight stands": ("optimizer.weight_decay=1e6",),
    "moments that do not fit": ("optimizer.betas=[0.9999,0.0]", "optimizer.lr=0.3"),
    "weights far too wide": ("model.init_std=100",),
    "a technique's own rate": ("techniques.muon.lr=1", "optimizer.lr=1"),
    "another optimizer": ("techniques.sophia={}", "optimizer.lr=4"),
}
QUICK = "the same in a warmup of the whole run"


@pytest.mark.parametrize(
    "wild",
    [
        pytest.param(keys, marks=[pytest.mark.slow] * (name != QUICK), id=name)
        for name, keys in WILD.items()
    ],
)
def test_the_printed_remedy_learns(
    wild: tuple[str, ...], plan_file: Path, tmp_path: Path, zygote: Any
) -> None:
    words = ["train", str(plan_file), *TINY, *wild]
    ended = zygote.run(tmp_path, *words, "name=wild", "--json")
    told = json.loads(ended.out)
    if ended.code:  # a loss that is no number ends it, with a command
        assert told["remedy"].startswith("headrace train "), told
        words = shlex.split(told["remedy"])[1:]
    else:
        found = json.loads(zygote.run(tmp_path, "doctor", "wild", "--json").out)
        assert found[0]["bottleneck"] == "instability", found[0]
        words = [*words, *found[0]["remedies"][0]["change"], "name=tame"]
    again = zygote.run(tmp_path, *words, "--json")
    assert again.code == 0, again.err
    report = json.loads(again.out)
    losses = [one["loss_nats"] for one in report["val"]]
    assert losses[-1] < losses[0] and losses[-1] < report["outcome"]["guess_nats"] - 0.5, losses
    assert not report["outcome"]["diverged"]


def test_given_weights_that_are_no_numbers_are_named(
    plan_file: Path, tmp_path: Path, zygote: Any, given: Any
) -> None:
    """Check that the error names the weights that are NaN, and advises no other learning rate."""
    start = given()
    file = Path(start.partition("=")[2].strip("'")) / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("down_proj.weight"))
    tensors[name][0, :2] = float("nan")
    save_file(tensors, file, metadata={"format": "pt"})
    ended = zygote.run(tmp_path, "train", str(plan_file), start, "goal.steps=2", "--json")
    told = json.loads(ended.out)
    assert (
        ended.code == 2
        and "holds 2 numbers" in told["error"]
        and "are NaN or infinite" in told["error"]
    )
    assert "mlp.down" in told["error"] and "lr=" not in told["remedy"]


@pytest.mark.parametrize(
    ("keys", "learns"),
    [
        (["optimizer.lr=1e6"], ["optimizer.lr=0.001", "schedule.warmup_steps=10"]),
        (["optimizer.lr=3e-4"], ["optimizer.lr=3e-05", "schedule.warmup_steps=10"]),
        (["optimizer.lr=1", "model.dim=1024", "schedule.warmup_steps=5"], ["optimizer.lr=0.00025"]),
        (["optimizer.weight_decay=1e6", "schedule.warmup_steps=5"], ["optimizer.weight_decay=0.1"]),
        (
            ["optimizer.betas=[0.5,0.1]", "schedule.warmup_steps=60"],
            ["optimizer.betas=[0.9,0.95]", "schedule.warmup_steps=10"],
        ),
        (
            ["optimizer.lr=1", "model.pretrained=there"],
            ["optimizer.lr=0.0001", "schedule.warmup_steps=10"],
        ),
    ],
)
def test_all_that_is_far_off_is_mended_at_once(keys: list[str], learns: list[str]) -> None:
    plan = Plan.read("", catalogue(), overrides=["goal.steps=100", *keys])
    assert [*gentler(plan)] == learns
    assert all(re.fullmatch(r"[\w.]+=\S+", one) for one in learns)
    Plan.read("", catalogue(), overrides=["goal.steps=100", *keys, *learns])


def test_the_usual_rate_falls_with_width() -> None:
    rates = [
        usual_rate(Plan.read("", catalogue(), overrides=["goal.steps=1", f"model.dim={dim}"]))
        for dim in (16, 64, 256, 768, 4096)
    ]
    assert rates == [0.004, 0.004, 0.001, 0.00033, 6.3e-05]

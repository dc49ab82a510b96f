"""What other trainers print is read step by step, and judged as far as it goes."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from headrace.cli.app import app
from headrace.doctor.findings import Kind
from headrace.doctor.log import TrainerLog, read_log
from headrace.doctor.run import examined


def titan(step: int, loss: float, at_s: float, mfu: float = 13.99) -> str:
    minute, second = divmod(at_s, 60)
    return (
        f"[rank0]:[titan] 2026-02-24 19:{int(minute):02d}:{int(second):02d},"
        f"{round(second % 1 * 1000):03d} - root - INFO - \x1b[31mstep: {step:2}  \x1b[32mloss: "
        f"{loss:8.5f}  \x1b[38mgrad_norm: 26.6250  \x1b[33mmemory: 66.91GiB(37.51%)  "
        f"\x1b[34mtps: 10,050  \x1b[36mtflops: 314.71  \x1b[35mmfu: {mfu:.2f}%\x1b[39m"
    )


def nanochat(step: int, loss: float, seconds: float) -> str:
    return (
        f"step {step:05d}/21400 (0.05%) | loss: {loss:.6f} | lrm: 1.00 | dt: {seconds * 1e3:.2f}ms "
        "| tok/sec: 1,042,143 | bf16_mfu: 48.31 | epoch: 1 pq: 0 rg: 3 | total time: 0.10m"
    )


def litgpt(step: int, loss: float, seconds: float, whole: str = " (step)") -> str:
    return (
        f"Epoch 1 | iter {2 * step} step {step} | loss train: {loss:.3f}, val: n/a | iter time: "
        f"{seconds * 1e3:.2f} ms{whole} remaining time: 0:10:00"
    )


def trainer(step: int, loss: float, at_s: int, quote: str = "") -> str:
    """A progress bar, overwritten, and what the loss's callback prints."""
    bar = f"\r {step}%|##  | {step}/400 [{at_s // 60:02d}:{at_s % 60:02d}<52:46,  5.00s/it]"
    table = {"loss": loss, "grad_norm": 59.5, "learning_rate": 4.9e-06}
    said = ", ".join(f"'{key}': {quote}{value}{quote}" for key, value in table.items())
    return f"{bar}\n{{{said}, 'memory/device_mem_reserved(gib)': 41.26, 'epoch': 1.0}}"


@pytest.fixture
def log_of(tmp_path: Path) -> Callable[[Iterator[str] | list[str]], Path]:
    """Write lines between others, and return the file."""

    def write(lines: Iterator[str] | list[str]) -> Path:
        file = tmp_path / "train.log"
        file.write_text("loading the model\n" + "\n".join(lines) + "\nsaving\n")
        return file

    return write


def known(file: Path) -> TrainerLog:
    log = read_log(file)
    assert log is not None
    return log


@pytest.mark.parametrize(
    ("line", "name"),
    [
        (lambda n: titan(n, 8 - n / 10, 1.5 * n), "torchtitan"),
        (lambda n: nanochat(n, 8 - n / 10, 1.5), "nanochat"),
        (lambda n: litgpt(n, 8 - n / 10, 1.5), "litgpt"),
        (lambda n: trainer(n * 20, 8 - n / 10, 30 * n), "a Hugging Face Trainer"),
        (lambda n: trainer(n * 20, 8 - n / 10, 30 * n, quote="'"), "a Hugging Face Trainer"),
    ],
)
def test_a_trainers_steps_are_read(line: Callable[[int], str], name: str, log_of: Any) -> None:
    log = known(log_of(map(line, range(1, 21))))
    assert log.format.trainer == name
    assert [row.loss for row in log.rows] == pytest.approx([8 - n / 10 for n in range(1, 21)])
    assert log.step_s and log.step_s == pytest.approx([1.5] * len(log.step_s))
    seen = log.observe()
    assert seen.steps >= 18 and seen.watched_steps == 20
    assert (seen.grad_norm is None) == (name in ("nanochat", "litgpt"))


def test_steps_that_are_logged_now_and_then_have_the_mean_time(log_of: Any) -> None:
    log = known(log_of(titan(10 * n, 5.0, 20.0 * n) for n in range(1, 12)))
    assert log.step_s == pytest.approx([2.0] * 9)


def test_a_step_of_several_ranks_counts_once_and_a_new_start_is_no_step(log_of: Any) -> None:
    first = [titan(n, 5.0, 2.0 * n) for n in range(1, 9) for _ in range(4)]
    again = [titan(n, 5.0, 900 + 2.0 * n) for n in range(5, 9)]
    log = known(log_of(first + again))
    assert [row.step for row in log.rows] == [*range(1, 9), *range(5, 9)]
    assert log.step_s == pytest.approx([2.0] * (6 + 3))


def test_micro_steps_of_litgpt_are_no_steps(log_of: Any) -> None:
    lines = [litgpt(n, 5.0, 0.5, whole) for n in range(1, 9) for whole in ("", " (step)")]
    assert len(known(log_of(lines)).rows) == 8


def test_a_high_share_of_the_peak_is_computation_and_a_low_one_stays_open(log_of: Any) -> None:
    for mfu, kind in ((48.0, Kind.NEAR_THE_PEAK), (13.99, Kind.UNPRICED)):
        file = log_of(titan(n, 5 - n / 100, 1.5 * n, mfu) for n in range(1, 40))
        seen, findings = examined([file])
        assert [finding.kind for finding in findings] == [kind]
        assert seen.use.peak == pytest.approx(mfu / 100)


def test_a_loss_that_rose_and_a_full_memory_are_found(log_of: Any) -> None:
    lines = [trainer(n, 2.0 + 3.0 * (n > 60) + n % 3 / 100, 20 * n) for n in range(1, 100)]
    file = log_of([*lines, "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 2 GiB."])
    shown = CliRunner().invoke(app, ["doctor", str(file), "--json"])
    assert shown.exit_code == 0, shown.output
    found = {one["bottleneck"]: one for one in json.loads(shown.stdout)}
    assert [*found] == ["memory capacity", "instability", "not measured"]
    first = [found[name]["remedies"][0]["command"] for name in ("memory capacity", "instability")]
    assert all("TrainingArguments" in command for command in first)


def test_a_loss_that_is_not_finite_is_lost(log_of: Any) -> None:
    file = log_of(titan(n, float("nan") if n > 20 else 5.0, 1.5 * n) for n in range(1, 40))
    _, findings = examined([file])
    assert findings[0].kind is Kind.LOST_STEPS


@pytest.mark.parametrize("text", ["", "step 5\n", "{'loss': 'x'}\n", "\x00\xff" * 100, "a" * 10**5])
def test_what_no_trainer_printed_is_no_log(text: str, tmp_path: Path) -> None:
    (file := tmp_path / "x.log").write_bytes(text.encode("latin-1"))
    assert read_log(file) is None

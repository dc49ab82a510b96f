"""A campaign runs each job once, alone on its GPU where it is timed, and goes on where it ended."""

import sys
from pathlib import Path

import campaign
import pytest

ROOT = Path(__file__).resolve().parents[2]

MARK = "date +%s.%N >> {logs}/times.$CUDA_VISIBLE_DEVICES; echo '{part} {left_s}'"
LIST = f"""
[[jobs]]
name = "everywhere"
seconds = 0.1
limit_s = 60
each_gpu = true
command = "{MARK}"

[[jobs]]
name = "alone"
seconds = 0.5
limit_s = 60
command = "echo $CUDA_VISIBLE_DEVICES > {{logs}}/alone; test ! -e {{logs}}/beside; sleep 0.6"

[[jobs]]
name = "first beside"
seconds = 0.5
limit_s = 60
timed = false
command = "sleep 0.8; echo $CUDA_VISIBLE_DEVICES >> {{logs}}/where"

[[jobs]]
name = "second beside"
seconds = 0.5
limit_s = 60
timed = false
command = "sleep 0.8; echo $CUDA_VISIBLE_DEVICES >> {{logs}}/where"

[[jobs]]
name = "too long"
seconds = 0.1
limit_s = 0.5
command = "sleep 60"

[[jobs]]
name = "no time"
seconds = 1000
command = "touch {{logs}}/never"
"""


def run(folder: Path, minutes: float = 0.5) -> None:
    file = folder / "list.toml"
    file.write_text(LIST)
    words = [str(file), "--gpus", "2", "--minutes", str(minutes), "--logs", str(folder / "logs")]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["campaign.py", *words])
        campaign.main()


def test_a_campaign(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    run(tmp_path)
    logs = tmp_path / "logs"
    ended = {file.stem: file.read_text().strip() for file in logs.glob("*.done")}
    assert ended.pop("too long") in ("-2", "-9")
    assert set(ended) == {"everywhere.0", "everywhere.1", "alone", "first beside", "second beside"}
    assert set(ended.values()) == {"0"}
    assert (logs / "everywhere.1.log").read_text().startswith("2/2 ")
    (where,) = {*(logs / "where").read_text().split()}
    assert where != (logs / "alone").read_text().strip()
    assert not (logs / "never").exists()
    said = capfd.readouterr().out
    run(tmp_path)
    assert "status" in said and "status" not in capfd.readouterr().out


def test_every_list_of_ours_can_be_read() -> None:
    for file in sorted((ROOT / "benchmarks" / "campaigns").glob("*.toml")):
        for job in campaign.jobs(file):
            assert job.command.format(python="p", data="d", logs="l", part="1/2", left_s=1)
            assert job.seconds <= job.most_s


def test_the_cores_of_a_gpu() -> None:
    """Check that a GPU gets its share of the cores, or a wider stretch that holds it."""
    host = list(range(32))
    assert campaign.cores_of(1, 2, 0, host) == host[16:]
    assert campaign.cores_of(0, 2, 24, host) == host[:24]
    assert campaign.cores_of(1, 2, 24, host) == host[8:]
    assert campaign.cores_of(0, 1, 24, host[:2]) == host[:2]

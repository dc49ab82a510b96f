"""Text in object stores: what an address names gives the shards of the same files on a disk."""

import errno
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.core.errors import ConfigError, RunError, UnsupportedError
from headrace.data.ingest import prepare
from headrace.data.left_out import Reason
from headrace.data.remote import is_remote
from headrace.data.scale.job import ingest_on
from headrace.data.scale.local import Processes
from headrace.plan.plan import Plan

fsspec = pytest.importorskip("fsspec")
INSTALL = "pip install 'headrace[engines]'"
FILES = {
    f"{n}.jsonl": "".join(
        json.dumps({"text": f"row {i} of file {n}: {'the mill grinds. ' * (i % 5)}"}) + "\n"
        for i in range(60)
    )
    for n in range(3)
}


@pytest.fixture
def store() -> Iterator[Any]:
    """A store in memory with three files of text and three that are none."""
    system = fsspec.filesystem("memory")
    others = {"photo.jpg": "x", "empty.txt": "", ".hidden.txt": "x"}
    for name, content in (FILES | others).items():
        system.pipe_file(f"/corpus/{name}", content.encode())
    yield system
    system.rm("/corpus", recursive=True)


def test_an_address_gives_the_shards_of_its_files(
    store: Any, make_plan: Callable[..., Plan], tmp_path: Path
) -> None:
    (tmp_path / "corpus").mkdir()
    for name, content in FILES.items():
        (tmp_path / "corpus" / name).write_text(content)
    local = prepare(make_plan(sources=str(tmp_path / "corpus"), validation=0.2))
    on_disk = f"file://{tmp_path}/corpus"
    for address in ("memory://corpus", "memory://corpus/*.jsonl", on_disk, f"{on_disk}/*.jsonl"):
        made = prepare(make_plan(sources=address, validation=0.2))
        assert made.fingerprint == local.fingerprint and made.directory != local.directory
        if address == "memory://corpus":
            reasons = {record.reason: record.count for record in made.left_out}
            assert reasons == {Reason.ENDING: 1, Reason.EMPTY_FILE: 1, Reason.HIDDEN: 1}
    again = prepare(make_plan(sources="memory://corpus", validation=0.2))
    store.pipe_file("/corpus/1.jsonl", FILES["0.jsonl"].encode())
    other = prepare(make_plan(sources="memory://corpus", validation=0.2))
    assert again.directory != other.directory
    assert again.fingerprint["data"] != other.fingerprint["data"]
    own = prepare(make_plan(sources=str(tmp_path / "corpus"), validation="memory://corpus/2.jsonl"))
    assert own.validation.documents == 60


def test_what_is_wrong_with_an_address_is_one_error(
    store: Any, make_plan: Callable[..., Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(kind: type[Exception], source: str, match: str, **keys: Any) -> str:
        with pytest.raises(kind, match=match) as error:
            prepare(make_plan(sources=source), **keys)
        return str(getattr(error.value, "remedy"))  # noqa: B009

    assert "data.sources=PATH" in refused(ConfigError, "memory://nowhere", "does not exist")
    assert "data.sources=PATH" in refused(ConfigError, "file:///nowhere/a.txt", "does not exist")
    refused(ConfigError, "memory://corpus/*.jpg", "no file that can be read, only 1 file of a kind")
    store.pipe_file("/corpus/2.jsonl", b"no row\n")
    remedy = refused(ConfigError, "memory://corpus", r"memory://.*/2\.jsonl:1 is not JSON")
    assert remedy == "a copy of it on this machine, mended, and data.sources=PATH"

    def change(*told: Any) -> None:
        store.pipe_file("/corpus/0.jsonl", b'{"text": "short"}\n')

    refused(ConfigError, "memory://corpus/0.jsonl", "changed while", progress=change)
    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", lambda s, path, to: Path(to).write_bytes(b"x"))
        refused(RunError, "memory://corpus/1.jsonl", "broke off: 1 of")

    def full(*given: Any) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(type(store), "get_file", full)
        assert "TMPDIR" in refused(RunError, "memory://corpus/1.jsonl", "is full: .* is copied")
    with monkeypatch.context() as patch:
        patch.setitem(__import__("sys").modules, "fsspec", None)
        assert "headrace[cloud]" in refused(UnsupportedError, "memory://corpus", "not installed")


@pytest.mark.parametrize(
    ("source", "remote"),
    [
        ("s3://b/x.txt", True),
        ("file:///x.txt", True),
        ("hf://datasets/a/b.jsonl", True),
        ("hf:a/b", False),
        ("a:b", False),
    ],
)
def test_an_address_is_known_by_its_scheme(source: str, remote: bool) -> None:
    assert is_remote(source) is remote


@pytest.mark.slow
def test_an_s3_server_gives_the_same(
    make_plan: Callable[..., Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = pytest.importorskip("moto.server", reason=INSTALL)
    s3fs = pytest.importorskip("s3fs", reason=INSTALL)
    running = server.ThreadedMotoServer(port=0)
    running.start()
    try:
        host, port = running.get_host_and_port()
        for name, value in {
            "AWS_ENDPOINT_URL": f"http://{host}:{port}",
            "AWS_ACCESS_KEY_ID": "a",
            "AWS_SECRET_ACCESS_KEY": "b",
            "AWS_DEFAULT_REGION": "us-east-1",
        }.items():
            monkeypatch.setenv(name, value)
        system = s3fs.S3FileSystem()
        system.mkdir("bucket")
        (tmp_path / "corpus").mkdir()
        for name, content in FILES.items():
            system.pipe_file(f"bucket/corpus/{name}", content.encode())
            (tmp_path / "corpus" / name).write_text(content)
        local = prepare(make_plan(sources=str(tmp_path / "corpus"), validation=0.2))
        made = prepare(make_plan(sources="s3://bucket/corpus", validation=0.2))
        assert made.fingerprint == local.fingerprint
        shutil.rmtree(made.directory)
        by_workers = ingest_on(
            make_plan(sources="s3://bucket/corpus", validation=0.2), Processes(2)
        )
        assert by_workers.fingerprint == local.fingerprint
        with pytest.raises(ConfigError, match=r"does not exist|cannot be read"):
            prepare(make_plan(sources="s3://nowhere/corpus"))
    finally:
        running.stop()

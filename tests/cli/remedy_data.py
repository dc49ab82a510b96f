"""Text and prepared shards that are wrong, beside those of remedy_inputs."""

import gzip
import hashlib
import io
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from remedy_inputs import GOOD, INGEST, MAKE, TOKENIZER, spoiled, text
from shell import Case

from headrace.data import parts
from headrace.data.cleaning import asked_sources
from headrace.data.left_out import LeftOutTally
from headrace.data.parts import list_parts
from headrace.data.scale.job import JobRecord
from headrace.data.shards import Manifest
from headrace.plan.data_config import DataConfig

ROWS = [json.loads(line)["text"] for line in GOOD.splitlines()]


def parquet(name: str, columns: list[pa.Array], names: list[str], *, packed: bool = False) -> MAKE:
    """Write a table."""
    pq.write_table(pa.Table.from_arrays(columns, names=names), buffer := io.BytesIO())
    raw = buffer.getvalue()
    return text(name, gzip.compress(raw) if packed else raw)


def not_utf_8() -> pa.Array:
    """Texts of which one is Latin-1."""
    raw = pa.array([*(row.encode() for row in ROWS), b"caf\xe9"], pa.binary())
    return pa.Array.from_buffers(pa.string(), len(raw), raw.buffers())


def small_values(patch: pytest.MonkeyPatch) -> None:
    """Let no document be as large as one of ours."""
    patch.setattr("headrace.data.text_file.MOST_DOCUMENT_BYTES", 4000)


FORMATS = {
    "data/columns:read_columns#1": Case(
        f"{INGEST}parquet.gz",
        parquet("x.parquet.gz", [pa.array(ROWS)], ["text"], packed=True),
    ),
    "data/columns:_columns#1": Case(
        f"{INGEST}parquet",
        parquet("x.parquet", [pa.array(ROWS)] * 2, ["text"] * 2),
        whole=True,
    ),
    "data/columns:_not_utf_8#1": Case(
        f"{INGEST}parquet", parquet("x.parquet", [not_utf_8()], ["text"]), whole=True
    ),
    "data/formats:read_file#2 named": Case(
        f"{INGEST}jsonl.gz",
        lambda _: (
            Path("x.jsonl.gz").write_bytes(gzip.compress(GOOD.encode())[:-30]),
            Path("y.jsonl").write_text(GOOD),
        ),
        fills={"PATH": "y.jsonl"},
    ),
    "data/formats:_check_packing#1": Case(
        f"{INGEST}jsonl", text("x.jsonl", gzip.compress(GOOD.encode())), whole=True
    ),
    "data/formats:_check_kind#1": Case(
        f"{INGEST}jsonl.gz",
        text("x.jsonl.gz", gzip.compress(gzip.compress(GOOD.encode()))),
        whole=True,
    ),
    "data/formats:_check_kind#2": Case(
        f"{INGEST}jsonl",
        parquet("x.jsonl", [pa.array(ROWS)], ["text"]),
        does={"mv x.jsonl x.jsonl.parquet": lambda _: Path("x.jsonl").rename("x.jsonl.parquet")},
    ),
    "data/formats:_check_kind#3": Case(
        f"{INGEST}txt",
        lambda _: (Path("x.txt").write_bytes(b"%PDF-1.7"), Path("y.jsonl").write_text(GOOD)),
        fills={"PATH": "y.jsonl"},
    ),
    "data/listing:_not_one#1": Case(
        f"{INGEST}jsonl,y.jsonl",
        lambda _: (Path("x.jsonl").write_text(GOOD), Path("y.jsonl").write_text(GOOD)),
    ),
    "data/left_out:without_text#1": Case(
        """data ingest {tiny} 'data.sources=["x.jsonl","y.jsonl"]'""",
        lambda _: (
            Path("x.jsonl").write_text(GOOD),
            Path("y.jsonl").write_text('{"text": null}\n'),
        ),
    ),
    "data/text_file:TextFile.too_large#1": Case(
        f"{INGEST}jsonl",
        text("x.jsonl", GOOD + json.dumps({"text": "the old mill " * 500}) + "\n"),
        fake=small_values,
        whole=True,
    ),
    "data/text_file:TextFile.too_large#1 plain": Case(
        f"{INGEST}txt",
        text("x.txt", "the old mill\n" * 500),
        fake=small_values,
        whole=True,
        lifted=True,
    ),
    "data/inspection/run:_nothing#1": Case(
        "data inspect x.jsonl",
        lambda _: (
            Path("x.jsonl").write_text('{"text": null}\n'),
            Path("y.jsonl").write_text(GOOD),
        ),
        fills={"PATH": "y.jsonl"},
    ),
    "data/heldout:refused_split#2": Case(
        f"{INGEST}txt",
        lambda _: (Path("x.txt").write_text("a"), Path("y.jsonl").write_text(GOOD)),
        fills={"PATH of a text of its own": "y.jsonl"},
        prose={"more text": "no command"},
    ),
    "data/mixture:_check_end#1": Case(
        "train {tiny} goal.steps=60 data.sources=x.jsonl data.mixture.max_epochs=1",
        text("x.jsonl", GOOD),
    ),
    "cli/data_mix:mix#1": Case(
        "data mix timed.toml",
        lambda _: (
            Path("x.jsonl").write_text(GOOD),
            Path("timed.toml").write_text(
                '[data]\nsources = "x.jsonl"\nvalidation = 0.2\nvocab = 300\n'
                'sequence_length = 16\n[goal]\nminutes = 1\n[schedule]\nkind = "constant"\n'
            ),
        ),
    ),
    "data/mixture:_check_shares#1": Case(
        'train {tiny} goal.steps=1 \'data.sources=["x.jsonl","y.jsonl"]\' '
        "'data.weights=[1,0.0000001]'",
        lambda _: (Path("x.jsonl").write_text(GOOD), Path("y.jsonl").write_text(GOOD)),
    ),
    "data/lossless:check_parts#1": Case(
        TOKENIZER,
        spoiled(lambda s: (s.update(added_tokens=[]), s["model"].update(vocab={}, merges=[]))),
        prose={"mend the file": "an edit by hand"},
    ),
    "data/lossless:check_parts#4": Case(
        TOKENIZER, spoiled(lambda s: s["model"].update(dropout=0.1)), whole=True
    ),
}


def shards(change: MAKE) -> MAKE:
    """Copy the shards of the run into `prepared`, and spoil those."""

    def make(run: Path) -> None:
        kept = Path(json.loads((run / "data.json").read_text())["absolute"])
        shutil.copytree(kept, folder := Path("prepared", kept.name))
        change(folder)

    return make


def changed(name: str, change: Callable[[bytes], bytes]) -> MAKE:
    """Change a file of the shards."""

    def make(folder: Path) -> None:
        (folder / name).write_bytes(change((folder / name).read_bytes()))

    return make


def sealed(change: Callable[[dict[str, Any], Path], Any]) -> MAKE:
    """Change what validation holds or says of itself, and seal that anew."""

    def make(folder: Path) -> None:
        side = folder / "validation"
        values = json.loads((side / "manifest.json").read_text())
        change(values, side)
        for entry, file in [
            (values["offsets"], "offsets.bin"),
            *((e, f"tokens-{n:05d}.bin") for n, e in enumerate(values["files"])),
        ]:
            entry["sha256"] = hashlib.sha256((side / file).read_bytes()).hexdigest()
        values["seal"] = Manifest.model_validate(values).digest
        (side / "manifest.json").write_text(json.dumps(values))

    return make


def first_ids(value: int) -> Callable[[dict[str, Any], Path], Any]:
    """Write an id over the first one."""

    def change(values: dict[str, Any], side: Path) -> None:
        with (side / "tokens-00000.bin").open("r+b") as file:
            file.write(value.to_bytes(2, "little"))

    return change


def spoiled_shards(change: MAKE) -> Case:
    """Shards that are wrong where a plan finds them; the remedy makes them again."""
    return Case("data ingest {tiny} data.directory=prepared", shards(change), whole=True)


def cut_short(patch: pytest.MonkeyPatch) -> None:
    """Let files of shards, which no map holds, end early while they are read."""
    patch.setattr("headrace.data.shard_files.OPEN_MAPS", 0)
    patch.setattr("os.pread", lambda file, size, begin: b"\0" * (size // 2))


MANIFEST = "validation/manifest.json"
SHARDS = {
    "data/ingest:_prepare#1": spoiled_shards(lambda f: (f / "tokenizer.json").unlink()),
    "data/shards:Shards.open#1": spoiled_shards(lambda f: (f / MANIFEST).unlink()),
    "data/shards:Shards.open#2": spoiled_shards(changed(MANIFEST, lambda raw: raw[:-30])),
    "data/shards:Shards.open#3": spoiled_shards(
        changed(MANIFEST, lambda raw: raw.replace(b"corpus", b"campus"))
    ),
    "data/shards:Shards.verify#1": spoiled_shards(
        changed("validation/tokens-00000.bin", lambda raw: raw[:-2])
    ),
    "data/shards:Shards._verify_content#1": spoiled_shards(
        changed("validation/tokens-00000.bin", lambda raw: b"\x01" + raw[1:])
    ),
    "data/shards:Shards._verify_offsets#1": spoiled_shards(
        sealed(lambda values, side: changed("offsets.bin", lambda r: b"\x01" + r[1:])(side))
    ),
    "data/shards:Shards._verify_ids#1": spoiled_shards(sealed(first_ids(300))),
    "data/shards:Shards._verify_starts#1": spoiled_shards(sealed(first_ids(1))),
    "data/shards:Shards.verify_bytes#1": spoiled_shards(
        sealed(lambda values, _: values.update(counted_bytes=values["counted_bytes"] + 1))
    ),
    "data/shards:_check_format#1": spoiled_shards(
        changed(MANIFEST, lambda raw: raw.replace(b'"format": ', b'"format": 9'))
    ),
    "data/shard_files:ShardFiles.read#1": Case(
        "train {tiny} goal.steps=1 data.directory=prepared",
        shards(lambda folder: None),
        fake=cut_short,
        does={"the same command again": lambda run: None},
        lifted=True,
    ),
    "data/prepared:open_prepared#1": spoiled_shards(
        changed("tokenizer.json", lambda raw: raw + b"\n")
    ),
    "data/prepared:_check_counts#1": spoiled_shards(
        sealed(lambda values, _: values.update(text_bytes=values["text_bytes"] + 1))
    ),
    "data/left_out:load#1": spoiled_shards(lambda f: (f / "left_out.json").write_text("{")),
    "data/heldout:Record.load#1": Case(
        "data ingest {tiny} data.directory=prepared",
        shards(lambda f: (f / "held-out.json").write_text("{")),
        whole=True,
    ),
}
"""Prepared shards that are damaged."""


def job(_: Path) -> None:
    """Make a job without any part."""
    Path("x.jsonl").write_text(GOOD)
    data = DataConfig(sources="x.jsonl")
    listed = list_parts(asked_sources(data), LeftOutTally())
    record = JobRecord(data=data, parts=listed, cwd=str(Path.cwd()))
    Path("job/survey").mkdir(parents=True)
    Path("job/job.json").write_text(record.model_dump_json())


def once(changed: Callable[[], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Change what is there while it is read, the first time."""
    read, left = parts.read_documents, [changed]

    def reading(*given: Any, **named: Any) -> Any:
        yield from read(*given, **named)
        while left:
            left.pop()()

    return lambda patch: patch.setattr(parts, "read_documents", reading)


def listed_once(patch: pytest.MonkeyPatch) -> None:
    """Let a file go away between its listing and its facts, the first time."""
    listing, gone = parts.list_source, [("z", Path("z.txt"))]
    patch.setattr(
        parts, "list_source", lambda *given: [*listing(*given), *(gone.pop() for _ in [*gone])]
    )


AGAIN = {"the same command again": lambda run: None}
NO_SLURM = "the same command on a machine that submits jobs to Slurm"
ENGINES = {
    "data/parts:SourceFile.check#1": Case(
        "data ingest {tiny} data.sources=x.jsonl",
        text("x.jsonl", GOOD),
        fake=once(lambda: Path("x.jsonl").write_text(GOOD * 2)),
        does=AGAIN,
    ),
    "data/parts:list_parts#1": Case(
        "data ingest {tiny} data.sources=x.jsonl",
        text("x.jsonl", GOOD),
        fake=listed_once,
        does=AGAIN,
    ),
    "data/scale/engines:EngineChoice.part_workers#1": Case(
        "data ingest {tiny} data.sources=x.jsonl --engine ray",
        text("x.jsonl", GOOD),
        fake=lambda patch: patch.setattr("importlib.util.find_spec", lambda name: None),
        prose={"pip install 'headrace[ray]'": "nothing is installed here"},
    ),
    "data/scale/slurm:SlurmArray.run#1": Case(
        "data ingest {tiny} data.sources=x.jsonl --engine slurm",
        text("x.jsonl", GOOD),
        fake=lambda patch: patch.setattr("shutil.which", lambda name: None),
        prose={NO_SLURM: "there is none here"},
    ),
    "cli/data_engine:submission#1": Case(
        "data ingest {tiny} data.sources=x.jsonl --dry-run", text("x.jsonl", GOOD)
    ),
    "cli/data_engine:_refuse_workers#1": Case(
        "data ingest {tiny} data.sources=x.jsonl --workers 1", text("x.jsonl", GOOD)
    ),
    "data/scale/engines:parse_task#1": Case("data part job --task 3/2", job),
    "data/scale/engines:as_job#2": Case("data part job --stage survy", job),
    "data/scale/engines:as_job#1": Case("data part nowhere", fills={"PLAN": "{tiny}"}),
}

DATA = FORMATS | SHARDS | ENGINES

"""What is closed, full, gone or not installed where data is read: each remedy mends it."""

import ctypes
import errno
import json
import os
import shlex
import shutil
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import tiktoken
from filelock import FileLock
from remedy_inputs import FINE, GOOD, INGEST, MAKE, TOKENIZER, spoiled, text, weights
from remedy_run_data import RUN_DATA
from shell import Case
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from headrace.data import ingest, sources, tokenizer
from headrace.data import training as tokenizer_training
from headrace.train import train as training

OVERRIDES, SEARCHES = 1 << 1, 1 << 2
"""Bits of root's rights to read and to search what is closed; capabilities(7)."""
VERSION_3 = 0x20080522


class _User:
    """Who runs this thread: root reads closed files too, and a test may run as root."""

    @property
    def is_root(self) -> bool:
        """Whether what is closed can be read all the same."""
        return os.geteuid() == 0

    @is_root.setter
    def is_root(self, wanted: bool) -> None:
        if os.geteuid():
            return
        libc, header = ctypes.CDLL(None, use_errno=True), (ctypes.c_uint32 * 2)(VERSION_3, 0)
        rights = (ctypes.c_uint32 * 6)()  # effective, permitted, inheritable; twice
        assert libc.capget(header, rights) == 0
        closed = rights[1] & (OVERRIDES | SEARCHES)
        rights[0] = rights[0] | closed if wanted else rights[0] & ~closed
        assert libc.capset(header, rights) == 0


USER = _User()


def not_root(patch: pytest.MonkeyPatch) -> None:
    """Let closed files be closed."""
    patch.setattr(USER, "is_root", False)


def closed(*paths: str) -> MAKE:
    """Text in a folder, some of which nobody may read."""

    def make(_: Path) -> None:
        Path("d/inner").mkdir(parents=True)
        for name in ("d/x.jsonl", "d/inner/y.jsonl"):
            Path(name).write_text(GOOD)
        for path in paths:
            Path(path).chmod(0)

    return make


def again(words: str = "the same command again") -> dict[str, Callable[[Path], Any]]:
    """What the remedy says in words is done by the next command line."""
    return {words: lambda run: None}


def no_datasets(patch: pytest.MonkeyPatch) -> None:
    """Let the package be away."""
    patch.setitem(sys.modules, "datasets", None)


def hub(rows: Callable[[str], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """Let the package give rows by the name of a data set."""

    def fake(patch: pytest.MonkeyPatch) -> None:
        module = SimpleNamespace(load_dataset=lambda name, *given, **options: rows(name))
        patch.setitem(sys.modules, "datasets", module)

    return fake


def cut_once() -> Callable[[str], Any]:
    """Rows of a connection that ends, the first time."""
    asked: list[str] = []

    def rows(name: str) -> Any:
        asked.append(name)
        yield from unknown("org/corpus")[: 1 if len(asked) == 1 else None]
        if len(asked) == 1:
            raise OSError("connection reset")

    return rows


def unknown(name: str) -> Any:
    """No data set of that name, unless it is the right one."""
    if name != "org/corpus":
        raise FileNotFoundError(f"Dataset {name} doesn't exist on the Hub")
    return [json.loads(line) for line in GOOD.splitlines()]


def undecodable(name: str) -> Any:
    """Rows of which one cannot be decoded, unless it is another data set."""
    rows = unknown("org/corpus")
    yield rows[0]
    if name != "org/corpus":
        raise ValueError("a row cannot be decoded")
    yield from rows


def gone_once(patch: pytest.MonkeyPatch) -> None:
    """Let a file go away between its name and its facts."""
    listed = sources.list_files
    patch.setattr(sources, "list_files", lambda *given: [*listed(*given), ("z", Path("z.txt"))])


def no_library(patch: pytest.MonkeyPatch) -> None:
    """Let this Python be one without its sources."""
    patch.setattr("sysconfig.get_paths", lambda: {"stdlib": "nowhere"})


def full(error: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Let the disk of the folder `full` fail."""
    whole = ingest.publish

    def publish(aside: Path, path: Path) -> None:
        if "full" in path.parts:
            raise OSError(error, os.strerror(error))
        whole(aside, path)

    return lambda patch: patch.setattr(ingest, "publish", publish)


def no_locks(patch: pytest.MonkeyPatch) -> None:
    """Let the file system of the folder `full` have no locks."""
    whole = FileLock.acquire

    def acquire(self: Any, *given: Any, **named: Any) -> Any:
        if "full" in Path(self.lock_file).parts:
            raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))
        return whole(self, *given, **named)

    patch.setattr(FileLock, "acquire", acquire)


def no_memory(patch: pytest.MonkeyPatch) -> None:
    """Let there be no memory to train a tokenizer in."""

    def fail(*given: Any, **named: Any) -> Any:
        raise MemoryError

    patch.setattr(tokenizer_training, "train_tokenizer", fail)


ENCODING = tiktoken.Encoding(
    "gpt2",
    pat_str=r"\w+|\W+",
    mergeable_ranks={bytes([byte]): byte for byte in range(256)},
    special_tokens={"<|endoftext|>": 256},
)


def kept_encodings(patch: pytest.MonkeyPatch) -> None:
    """Let tiktoken's files be here."""
    patch.setattr(tokenizer.tiktoken, "get_encoding", lambda name: ENCODING)


def no_network(patch: pytest.MonkeyPatch) -> None:
    """Let tiktoken's files be elsewhere."""

    def fail(name: str) -> Any:
        raise ConnectionError("no network")

    patch.setattr(tokenizer.tiktoken, "get_encoding", fail)


def words(_: Path) -> None:
    """Write a tokenizer whose tokens are whole words, and a file of text."""
    theirs = Tokenizer(models.WordLevel({"[UNK]": 0, "the": 1}, unk_token="[UNK]"))
    theirs.add_special_tokens(["<|endoftext|>"])
    Path("tok.json").write_text(theirs.to_str())
    Path("x.jsonl").write_text(GOOD)


def lower(spec: dict[str, Any]) -> None:
    """Let a tokenizer lose capitals."""
    spec["normalizer"] = {"type": "Lowercase"}


BY_HAND = "an edit by hand"
SHARED = {
    "data/formats:read_file#1": Case(
        f"{INGEST}jsonl",
        lambda _: (Path("x.jsonl").write_text(GOOD), Path("x.jsonl").chmod(0)),
        fake=not_root,
    ),
    "data/listing:_closed#1": Case("data ingest {tiny} data.sources=d", closed("d"), fake=not_root),
    "data/listing:_closed#1 file": Case(
        "data ingest {tiny} data.sources=d/x.jsonl", closed("d"), fake=not_root
    ),
    "data/listing:_closed#1 deep": Case(
        "data ingest {tiny} data.sources=d/inner/y.jsonl", closed("d"), fake=not_root
    ),
    "data/listing:_closed#1 twice": Case(
        "data ingest {tiny} data.sources=d/inner/y.jsonl", closed("d/inner", "d"), fake=not_root
    ),
    "data/listing:list_files#3": Case(
        f"{INGEST}{'l' * 300}", text("x.jsonl", GOOD), fills={"PATH": "x.jsonl"}
    ),
    "data/listing:_standard_library#1": Case(
        "data ingest {tiny} data.sources=stdlib",
        text("x.jsonl", GOOD),
        fake=no_library,
        fills={"PATH": "x.jsonl"},
    ),
    "data/sources:source_signature#1": Case(
        f"{INGEST}jsonl", text("x.jsonl", GOOD), fake=gone_once, lifted=True, does=again()
    ),
    "data/sources:_hugging_face#1": Case(
        "data ingest {tiny} data.sources=hf:x.jsonl",
        text("x.jsonl", GOOD),
        fake=no_datasets,
        lifted=True,
        does=again("pip install 'headrace[hf]'"),
    ),
    "data/sources:_hugging_face#2": Case(
        "data ingest {tiny} data.sources=hf:org/corpse",
        fake=hub(unknown),
        fills={"hf:NAME[:CONFIG][@SPLIT]": "hf:org/corpus"},
    ),
    "data/sources:_hugging_face#3": Case(
        "data ingest {tiny} data.sources=hf:org/cut", fake=hub(cut_once()), does=again()
    ),
    "data/sources:_hugging_face#4": Case(
        'data ingest {tiny} \'data.sources=["hf:org/bad","hf:org/corpus"]\'',
        fake=hub(undecodable),
    ),
    "data/sources:_hugging_face#4 alone": Case(
        "data ingest {tiny} data.sources=hf:org/bad",
        text("x.jsonl", GOOD),
        fake=hub(undecodable),
        fills={"PATH": "x.jsonl"},
    ),
    "data/ingest:disk_error#1": Case(
        "data ingest {tiny} data.directory=taken",
        text("taken", ""),
        fills={"FOLDER that can be written, on a local disk": "prepared"},
    ),
    "data/ingest:disk_error#2": Case(
        "data ingest {tiny} data.directory=full",
        fake=full(errno.ENOSPC),
        fills={"FOLDER on another disk": "prepared"},
        prose={"free some space": "no command"},
    ),
    "data/ingest:prepare#1": Case(
        "data ingest {tiny} data.directory=prepared",
        fake=no_memory,
        fills={"PATH of a tokenizer.json": "{run}/tokenizer.json"},
        prose={
            "smaller documents: a .txt, .md": "other text",
            ".py file is one and is read whole, .jsonl and .parquet row by row": "other text",
            "free some memory": "no command",
        },
    ),
    "core/files:hold_lock#1": Case(
        "data ingest {tiny} data.directory=full",
        fake=no_locks,
        fills={"FOLDER on one of these": "prepared"},
    ),
    "core/files:_not_utf_8#1": Case(
        f"{INGEST}caf\udce9.jsonl", lambda _: Path("x.caf\udce9.jsonl").write_text(GOOD)
    ),
    "cli/runs:read_prompt#1": Case("sample demo --tokens 2 --prompt caf\udce9"),
}
"""Files, disks and packages."""
FETCH = shlex.quote("import tiktoken; tiktoken.get_encoding('gpt2')")
ELSEWHERE = (
    f"TIKTOKEN_CACHE_DIR=kept python -c {FETCH} where there is a network, and a copy of kept "
    "here, with TIKTOKEN_CACHE_DIR=kept before the same command"
)
TOKENIZERS = {
    "data/tokenizer:open_tokenizer#3": Case(
        f"{INGEST}jsonl data.tokenizer=gpt2", text("x.jsonl", GOOD), fake=kept_encodings
    ),
    "data/tokenizer:open_tokenizer#4": Case(
        f"{INGEST}jsonl data.tokenizer=tiktoken:gpt22", text("x.jsonl", GOOD), fake=kept_encodings
    ),
    "data/tokenizer:open_tokenizer#5": Case(
        f"{INGEST}jsonl data.tokenizer=tiktoken:gpt2",
        text("x.jsonl", GOOD),
        fake=no_network,
        fills={f"{ELSEWHERE}; or ": ""},
    ),
    "data/spelling:token_bytes#1": Case(
        TOKENIZER,
        words,
        prose={"a byte-level tokenizer.json": "there is none", "GPT-2, Llama 3, Qwen": "examples"},
    ),
    "data/tokenizer:Tokenizer.refuse_losses#1": Case(
        TOKENIZER,
        spoiled(lower),
        prose={"a copy of it without its normalizer Lowercase": BY_HAND},
    ),
    "core/folders:refuse_no_tokenizer#1": Case(
        f"{INGEST}jsonl data.tokenizer=d",
        lambda run: (
            Path("d").mkdir(),
            Path("x.jsonl").write_text(GOOD),
            Tokenizer.from_file(str(run / "tokenizer.json")).model.save("d"),
            Path("d/tokenizer_config.json").write_text('{"tokenizer_class": "GPT2Tokenizer"}'),
        ),
        whole=True,
    ),
}
"""Tokenizers that a user names."""


def named(name: str) -> MAKE:
    """Export the run into a folder of that name."""
    return weights(lambda folder: folder.rename(name))


FOLDERS = {
    "core/folders:refuse_absent#1": Case(
        f"{FINE}f",
        weights(lambda _: None),
        fills={"; or hf download hff --local-dir hff, then model.pretrained=hff": ""},
    ),
    "core/folders:refuse_absent#1 hub": Case(
        "explain demo device=cpu model.pretrained=org/chat",
        lambda run: (weights(lambda _: None)(run), shutil.move("hf", "kept")),
        does={
            "hf download org/chat --local-dir chat, then ": lambda _: shutil.move("kept", "chat")
        },
    ),
    "core/folders:refuse_absent#1 gone": Case(
        f"explain demo device=cpu model.pretrained={{run}}/{'x' * 50}",
        weights(lambda _: None),
        fills={"PATH": "hf"},
    ),
    "core/folders:refuse_no_model#1": Case("explain demo device=cpu model.pretrained=runs/demo"),
    "core/folders:refuse_no_model#4": Case(
        f"{FINE}/model.safetensors", weights(lambda _: None)
    ),
    "core/folders:refuse_no_model#4 none": Case(
        "explain demo device=cpu model.pretrained=runs",
        weights(lambda _: None),
        fills={"FOLDER with config.json and *.safetensors, as save_pretrained writes it": "hf"},
    ),
    "data/pretrained:check_tokenizer#1": Case(
        f"{FINE} data.tokenizer=tok.json",
        lambda run: (
            weights(lambda folder: (folder / "tokenizer.json").rename("theirs.json"))(run),
            spoiled(lambda s: s["added_tokens"].append({**s["added_tokens"][0], "id": 300,
                                                        "content": "<more>"}))(run),
        ),
        fills={"PATH": "theirs.json"},
    ),
}  # fmt: skip
"""Folders of weights."""


def swallows_blocks(_: Path) -> None:
    """A tokenizer that takes U+2581 for a blank, and text that has it."""
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {"\u2581": 256}
    theirs = Tokenizer(models.BPE(vocab, [], byte_fallback=True, fuse_unk=True))
    theirs.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never", split=False)
    theirs.decoder = decoders.Sequence(
        [decoders.ByteFallback(), decoders.Metaspace(prepend_scheme="never")]
    )
    theirs.add_special_tokens(["<|endoftext|>"])
    Path("tok.json").write_text(theirs.to_str())
    Path("x.jsonl").write_text(GOOD + json.dumps({"text": "a\u2581b"}) + "\n")


def no_room(patch: pytest.MonkeyPatch) -> None:
    """Let no step fit in memory that has more than one row at a time, and keeps all of them."""
    step = training.step

    def full(build: Any, micros: Any, index: int, *rest: Any) -> Any:
        plan = build.plan
        if "selective_checkpoint" not in plan.techniques and plan.batch.micro_sequences != 1:
            raise MemoryError
        return step(build, micros, index, *rest)

    patch.setattr(training, "step", full)


def no_readers(patch: pytest.MonkeyPatch) -> None:
    """Let no thread start that reads data ahead."""
    start = threading.Thread.start

    def refused(thread: threading.Thread) -> None:
        if thread.name.startswith("headrace-data"):
            raise RuntimeError("can't start new thread")
        start(thread)

    patch.setattr(threading.Thread, "start", refused)


FEWER = "OMP_NUM_THREADS=1 RAYON_NUM_THREADS=1 before the command, to start fewer"
STEPS = {
    "data/tokenizer:Tokenizer.check_document#1": Case(TOKENIZER, swallows_blocks),
    "core/errors:at_a_limit#1": Case(
        "train {tiny} name=full goal.steps=1 guard=false",
        fake=no_room,
        fills={"N with a smaller N": "1"},
    ),
    "core/errors:at_a_limit#2": Case(
        "train {tiny} name=full goal.steps=1 guard=false",
        fake=no_readers,
        fills={", and " + FEWER: "", " (--without loader_workers, where that is on)": ""},
        prose={"raise that limit": "no command", "end other processes": "no command"},
    ),
}
"""Text and memory that a run meets while it goes on."""
PLACES = SHARED | TOKENIZERS | FOLDERS | RUN_DATA | STEPS
MEANT = {
    "plan/doubts:check_meant#1": Case(
        "train {tiny} name=full goal.steps=1 --with lora",
        weights(lambda _: None),
        fills={"FOLDER of a trained model in Hugging Face format": "hf"},
        prose={"of a run: headrace export RUN --to hf": "how hf was made"},
    ),
}
"""Plans of which nothing can come; what is named then must fit the rest of the plan."""

"""Text, shards, tokenizers, weights and files of a run that are wrong: each remedy mends them.

Every way of these remedies ends in success, but for those that are done elsewhere.
"""

import gzip
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shell import Case, once, run

GOOD = "".join(
    json.dumps({"text": f"The mill {n} grinds the corn of the valley on day {n}."}) + "\n"
    for n in range(60)
)
TABLE = "hello there old mill,1\n" * 60
INGEST = "data ingest {tiny} data.sources=x."
MAKE = Callable[[Path], Any]


def text(name: str, content: str | bytes) -> MAKE:
    """Write a file."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda _: Path(name).write_bytes(raw)


def two(name: str, content: str, other: str) -> MAKE:
    """Write a file, and text under another name."""
    return lambda _: (Path(name).write_text(content), Path(other).write_text(GOOD))


def mended(ending: str, content: str | bytes, more: str = "") -> Case:
    """A file whose remedy writes it again."""
    return Case(f"{INGEST}{ending} {more}", text(f"x.{ending}", content), whole=True)


def aside(content: str | bytes, ending: str = "jsonl") -> Case:
    """A file in a folder with others whose remedy takes it out."""

    def make(_: Path) -> None:
        Path("d").mkdir()
        Path("d/good.jsonl").write_text(GOOD)
        raw = content.encode() if isinstance(content, str) else content
        Path(f"d/x.{ending}").write_bytes(raw)

    return Case("data ingest {tiny} data.sources=d", make, whole=True)


def spoiled(change: Callable[[dict[str, Any]], Any]) -> MAKE:
    """Write a tokenizer.json that is another than the run's."""

    def make(folder: Path) -> None:
        spec = json.loads((folder / "tokenizer.json").read_text())
        change(spec)
        Path("tok.json").write_text(json.dumps(spec))
        Path("x.jsonl").write_text(GOOD)

    return make


CONFIG = Path(__file__).parents[1] / "migrate" / "configs" / "litgpt_lora.yaml"
TOKENIZER = f"{INGEST}jsonl data.tokenizer=tok.json"
TEXT = {
    "cli/migrate:_write#1": Case(f"import litgpt {CONFIG} --out x.toml", text("x.toml", "there")),
    "data/fields:text_of#1": mended("jsonl", GOOD + "3\n"),
    "data/fields:_field#1": mended("jsonl", GOOD + '{"text": [1]}\n'),
    "data/fields:no_field#1": Case(f"{INGEST}jsonl", text("x.jsonl", GOOD.replace("text", "body"))),
    "data/fields:lacks#1": mended("jsonl", GOOD + '{"x": 1}\n'),
    "data/formats:_json_lines#1": mended("jsonl", '{"text": "a", "text": "b"}\n' + GOOD),
    "data/formats:read_file#2": aside(gzip.compress(GOOD.encode())[:-30], "jsonl.gz"),
    "data/formats:_check_text#1": aside(bytes(5000), "txt"),
    "data/formats:_check_text#2": mended("txt", ("the old mill " * 300).encode("utf-16")),
    "data/formats:_table#1": mended("csv", f"text,x\n{TABLE}a\n"),
    "data/formats:_table#2": mended("csv", f'text,x\n{TABLE}"open,1\n'),
    "data/formats:_check_header#1": mended("csv", f"text,x\n{TABLE}".replace(",", ";")),
    "data/formats:_check_header#2": mended("csv", "text,text\na,the old mill\n" * 60),
    "data/text_file:TextFile.decoded#1": mended("jsonl", GOOD.encode() + b'{"text": "caf\xe9"}\n'),
    "data/json_values:json_values#1": mended(
        "json", json.dumps({"data": [json.loads(line) for line in GOOD.splitlines()]})
    ),
    "data/json_values:_Values._error#1": aside('[{"text": "a"}] x', "json"),
    "data/listing:list_files#1": Case(
        "data ingest {tiny} data.sources=", text("x.jsonl", GOOD), fills={"PATH": "x.jsonl"}
    ),
    "data/listing:list_files#2": Case(
        "data ingest {tiny} data.sources=pipe",
        lambda _: os.mkfifo("pipe"),
        does={"cat pipe > TEXT.txt, and ": text("TEXT.txt", GOOD)},
    ),
    "data/listing:_missing#1": Case(
        "data ingest {tiny} data.sources=link",
        lambda _: (os.symlink("nowhere", "link"), Path("x.jsonl").write_text(GOOD)),
        fills={"PATH": "x.jsonl"},
    ),
    "data/listing:_missing#2": Case(
        "data ingest {tiny} data.sources=y.jsonl", text("x.jsonl", GOOD)
    ),
    "data/listing:_readable#1": Case(
        f"{INGEST}html",
        text("x.html", GOOD),
        does={"cp x.html x.html.txt, and ": lambda _: shutil.copy("x.html", "x.html.txt")},
        prose={"if it is text": "it is"},
    ),
    "data/listing:_nothing#1": Case(
        "data ingest {tiny} data.sources=empty",
        lambda _: (Path("empty").mkdir(), Path("x.jsonl").write_text(GOOD)),
        fills={"PATH": "x.jsonl"},
    ),
    "data/heldout:refused_split#1": Case(
        f"{INGEST}jsonl data.validation=1e-6",
        text("x.jsonl", GOOD),
        prose={"more text": "no command"},
    ),
    "data/left_out:without_text#1 all": Case(
        f"{INGEST}txt", two("x.txt", "", "y.jsonl"), fills={"PATH": "y.jsonl"}
    ),
    "data/shards:ShardWriter.close#1": Case(
        "data ingest {tiny} data.validation=x.txt",
        two("x.txt", "", "y.jsonl"),
        fills={"PATH of text": "y.jsonl", "a share, as ": ""},
    ),
    "data/rows:Cut.__init__#1": Case(
        "train {tiny} data.sequence_length=4096 batch.tokens=4096 data.sources=x.jsonl",
        text("x.jsonl", GOOD),
        prose={"more text": "no command"},
    ),
    "data/packing/best_fit:BestFit._count#1": Case(
        "train {tiny} data.sequence_length=4096 batch.tokens=4096 data.sources=x.jsonl "
        "--with best_fit_packing",
        text("x.jsonl", GOOD),
        prose={"more text": "no command"},
    ),
    "data/sources:_parse_hf#1": Case(
        "data ingest {tiny} data.sources=hf:",
        text("x.jsonl", GOOD),
        fills={"hf:NAME": "x.jsonl"},
    ),
    "data/tokenizer:open_tokenizer#1": Case("data ingest {tiny} data.tokenizer=BPE"),
    "data/tokenizer:open_tokenizer#2": Case("data ingest {tiny} data.tokenizer="),
    "data/tokenizer:Tokenizer.load#1": Case(
        TOKENIZER,
        lambda _: (Path("tok.json").write_bytes(b"\xe9"), Path("x.jsonl").write_text(GOOD)),
        prose={"a path of a tokenizer.json": "there is none", "tiktoken:NAME": "no network"},
        fills={", a path of a tokenizer.json, or tiktoken:NAME": ""},
    ),
    "data/training:refuse_training_keys#1": Case(
        "data ingest {tiny} data.tokenizer={run}/tokenizer.json data.tokenizer_pattern=gpt4"
    ),
    "data/bpe:check_entries#1": Case(
        """data ingest {tiny} 'data.special_tokens=["<|a|>", "<|a|>"]'"""
    ),
    "data/bpe:check_entries#1 verb": Case(
        "data tokenizer x.jsonl --vocab 300 --special 'a b'", text("x.jsonl", GOOD)
    ),
    "data/bpe:check_entries#2 verb": Case(
        "data tokenizer x.jsonl --vocab 257 --special '<|a|>'", text("x.jsonl", GOOD)
    ),
    "cli/data_tokenizer:train_file#1": Case(
        "data tokenizer x.txt --vocab 300",
        two("x.txt", "", "y.jsonl"),
        fills={"PATH": "y.jsonl"},
    ),
    "cli/data_fertility:_opened#1": Case(
        "data fertility gone.json {run}/tokenizer.json --text x.txt", text("x.txt", GOOD)
    ),
    "data/fertility:measure#1": Case(
        "data fertility {run}/tokenizer.json --text x.txt",
        two("x.txt", "", "y.jsonl"),
        fills={"PATH": "y.jsonl"},
    ),
    "data/document_token:find_document_token#1": Case(
        TOKENIZER,
        spoiled(lambda s: (s.update(added_tokens=[]), s["model"]["vocab"].pop("<|endoftext|>"))),
        prose={"add one of them to its added_tokens": "an edit by hand"},
    ),
    "data/lossless:guarded#1": Case(TOKENIZER, spoiled(lambda s: s.pop("model"))),
    "data/lossless:check_parts#2": Case(
        TOKENIZER,
        spoiled(lambda s: s["model"]["vocab"].update(zz=5)),
        prose={"mend the file": "an edit by hand"},
    ),
    "data/lossless:check_parts#3": Case(
        TOKENIZER,
        spoiled(lambda s: s["model"]["vocab"].update(zz=10**7)),
        prose={"mend the file": "an edit by hand"},
    ),
    "core/folders:refuse_no_tokenizer#2": Case(
        f"{INGEST}jsonl data.tokenizer=d",
        lambda _: (Path("d").mkdir(), Path("x.jsonl").write_text(GOOD)),
        fills={", a path of a tokenizer.json, or tiktoken:NAME": ""},
    ),
}
"""Text and tokenizers that a user brings."""


def spoil(name: str, content: str | bytes) -> MAKE:
    """Write nonsense into a file of the run."""
    raw = content.encode() if isinstance(content, str) else content
    return lambda folder: (folder / name).write_bytes(raw)


def gone(name: str) -> MAKE:
    """Take a file of the run away."""
    return lambda folder: (folder / name).unlink()


def resumed(folder: Path) -> None:
    """Let the run have been resumed, and not have ended since."""
    report = json.loads((folder / "report.json").read_text())
    (folder / "report.json").write_text(json.dumps(report | {"status": "running"}))


def beneath(folder: Path) -> None:
    """Lay the run one folder deeper than it is looked for."""
    (folder / "inner").mkdir()
    for path in [*folder.iterdir()]:
        if path.name not in ("inner", "plan.toml"):
            path.rename(folder / "inner" / path.name)
    shutil.copy(folder / "plan.toml", folder / "inner")


RUN = {
    "inference/load:resolve_run#1": Case("eval demo", gone("plan.toml"), whole=True),
    "recipes/__init__:read_recipe#2": Case(
        "train runs/demo/plan.toml --resume goal.steps=7", gone("plan.toml"), whole=True
    ),
    "core/files:read_plan_text#2": Case(
        "train runs/demo/plan.toml --resume goal.steps=7", spoil("plan.toml", "x = ["), whole=True
    ),
    "inference/load:read_plan#1": Case("eval demo", spoil("plan.toml", "x = ["), whole=True),
    "inference/load:own_tokenizer#1": Case("sample demo", spoil("tokenizer.json", "{"), whole=True),
    "train/checkpoint:Saved.damaged#1": Case(
        "sample demo", gone("checkpoints/step-6/checkpoint.json")
    ),
    "report/metrics:read_text#1": Case(
        "report demo", spoil("metrics.jsonl", b"\xe9\n"), whole=True
    ),
    "report/run_files:_read_object#1": Case(
        "report demo", spoil("environment.json", "{"), whole=True
    ),
    "report/run_files:read_report#2": Case("report demo", resumed, whole=True),
    "report/run_files:read_report#3": Case("report demo", spoil("report.json", "{}"), whole=True),
    "report/metrics:metric_values#1": Case(
        "report demo", spoil("metrics.jsonl", "[]\n"), whole=True
    ),
    "report/run_files:_check_is_run#3": Case("report demo", beneath),
    "report/run_files:_check_is_run#4": Case("report demo", gone("report.json"), whole=True),
    "train/run_folder:RunFolder.read_data#1": Case(
        "eval demo",
        spoil("data.json", "{}"),
        prose={"the data is prepared as plan.toml says": "what the next command does"},
    ),
    "cli/arguments:_check_name#1": Case(
        "sample demo --checkpoint ../checkpoints/step-06 --tokens 2"
    ),
    "report/page:write_page#1": Case("report demo runs/demo --output runs", lambda folder: None),
}
"""Files of a run that are damaged."""


def weights(change: MAKE) -> MAKE:
    """Export the run into `hf`, and spoil that."""

    def make(_: Path) -> None:
        once(export_the_run, "hf")
        change(Path("hf"))

    return make


def export_the_run() -> None:
    """Write its weights into `hf`."""
    assert run(["export", "demo", "--to", "hf", "--output", "hf"]).code == 0


def config(**keys: Any) -> MAKE:
    """Write other values into config.json, after a copy of it."""

    def change(folder: Path) -> None:
        shutil.copy(folder / "config.json", "config.kept")
        values = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(values | keys))

    return weights(change)


FETCH = "hf download OWNER/NAME --local-dir hf, with the name that the weights were published under"
FINE = "explain demo device=cpu model.pretrained=hf"


def swapped(spec: dict[str, Any]) -> None:
    """Let two ids of a tokenizer mean each other's text."""
    vocab = spec["model"]["vocab"]
    vocab["a"], vocab["b"] = vocab["b"], vocab["a"]


def kept(_: Path) -> None:
    """Bring config.json back."""
    shutil.copy("config.kept", "hf/config.json")


WEIGHTS = {
    "model/hf_config:_config_from_hf#2": Case(
        FINE,
        config(hidden_size=-16),
        does={"the config.json that was published with these weights": kept},
        then=FINE,
    ),
    "model/hf_config:_config_from_hf#1": Case(
        FINE, config(hidden_size=None), does={"'hidden_size': N in it": kept}, then=FINE
    ),
    "model/adapter:read_json#2": Case(
        FINE,
        weights(
            lambda folder: (
                shutil.copy(folder / "config.json", "config.kept"),
                (folder / "config.json").write_text("{"),
            )
        ),
        does={FETCH: kept},
        then=FINE,
    ),
    "model/adapter:_check_index#1": Case(
        FINE,
        weights(
            lambda folder: (
                (folder / "model.safetensors").rename(folder / "a.safetensors"),
                (folder / "model.safetensors.index.json").write_text(
                    json.dumps({"weight_map": {"model.norm.weight": "a.safetensors"}})
                ),
            )
        ),
        prose={FETCH: "no network"},
    ),
    "data/pretrained:check_tokenizer#2": Case(
        f"{FINE} data.tokenizer=tok.json",
        lambda folder: (weights(lambda _: None)(folder), spoiled(swapped)(folder)),
    ),
    "cli/plans:_weigh#1": Case(
        f"{FINE} data.vocab=300", weights(lambda folder: None), prose={"leave it out": "as FINE"}
    ),
    "assemble/build:_as_pretrained#1": Case(
        "train demo device=cpu data.sources=x.jsonl data.sequence_length=16 batch.tokens=128 "
        "goal.steps=1 eval.tokens=64 schedule.warmup_steps=0 model.pretrained=hf model.layers=7",
        weights(lambda _: Path("x.jsonl").write_text(GOOD)),
    ),
}
"""Weights that a user brings."""
INPUTS = TEXT | RUN | WEIGHTS

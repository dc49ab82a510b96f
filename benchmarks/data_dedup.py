"""Measure deduplication on a CPU: speed end to end, recall, wrong merges, and memory.

python benchmarks/data_dedup.py speed --data DIR [--passages 20000] [--daft-python VENV/bin/python]
python benchmarks/data_dedup.py recall [--pairs 10000] [--data DIR]
python benchmarks/data_dedup.py filters --data DIR
python benchmarks/data_dedup.py memory [--gigabytes 0.1] [--evaluation WORDS]

DIR holds text files, which are cut into passages, and for `recall` neardup.jsonl: rows with `text`,
`cluster` and `kind`. Every side of `speed` is a process of its own that reads the same Parquet file
and ends with clusters; what was compiled or imported before it read is told apart. `--cores` is the
number of cores that a side may use. Datatrove takes part where this Python has it, with spacy,
orjson and an xxhash below 4, in one process. Rows are of topic `data`, kinds `dedup_*`.
"""

import argparse
import json
import os
import random
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import receipts

from headrace.data.quality.bloom import RepeatedPassages, count_ngrams
from headrace.data.quality.decontaminate import Decontaminator
from headrace.data.quality.exact import ExactDocuments, ExactParagraphs
from headrace.data.quality.minhash import NearDuplicates
from headrace.data.sources import read_documents
from headrace.plan.cleaning import DecontaminationConfig

HERE = Path(__file__).resolve().parent
PASSAGE_BYTES = 2000
"""Bytes of a passage, about: it ends where a word does."""
EDITED = 0.2
"""Share of the passages that are repeated with some words changed."""
THRESHOLD = 0.8
EVALUATION_WORDS, CONTAMINATED = 100, 100
"""Words of an evaluation document, and documents of text of which one holds one."""
FALSE_POSITIVES = 0.01


def passages(data: Path, count: int) -> list[str]:
    """Return passages of text files, of which some stand there twice with words changed."""
    draw, texts = random.Random(0), []
    files = sorted(data.rglob("*.txt"))
    while files and len(texts) < count:
        words = files.pop(0).read_text(errors="replace").split()
        while words and len(texts) < count:
            length, end = 0, 0
            while end < len(words) and length < PASSAGE_BYTES:
                length += len(words[end]) + 1
                end += 1
            texts.append(" ".join(words[:end]))
            if draw.random() < EDITED:
                texts.append(" ".join(edited(draw, words[:end])))
            words = words[end:]
    draw.shuffle(texts)
    return texts


def edited(draw: random.Random, words: list[str]) -> list[str]:
    """Return words of which a few are replaced: pairs from Jaccard index 1 down to about 0.4."""
    words = list(words)
    for _ in range(draw.randrange(0, 2 + len(words) // 20)):
        words[draw.randrange(len(words))] = f"edit{draw.randrange(10**6)}"
    return words


def ngram_hashes(text: str) -> np.ndarray:
    """Return the n-grams of a text by Python's own means, as sorted hashes."""
    words = "".join(c if c.isalnum() else " " for c in text.casefold()).split()
    grams = [tuple(words[n : n + 5]) for n in range(max(1, len(words) - 4))]
    return np.unique(np.array([hash(gram) for gram in grams], np.int64))


def jaccard(one: np.ndarray, two: np.ndarray) -> float:
    """Return the Jaccard index of two sets of distinct numbers."""
    both = np.intersect1d(one, two, assume_unique=True).size
    return both / max(1, one.size + two.size - both)


def generated_pairs(count: int) -> Iterator[tuple[str, str]]:
    """Yield pairs of texts whose Jaccard index lies between 0.3 and 1."""
    draw = random.Random(1)
    for _ in range(count):
        words = [f"w{draw.randrange(20_000)}" for _ in range(draw.randrange(40, 400))]
        changed = list(words)
        for _ in range(draw.randrange(0, 2 + len(words) // 12)):
            changed[draw.randrange(len(words))] = f"x{draw.random()}"
        yield " ".join(words), " ".join(changed)


def judge(pairs: list[tuple[str, str]]) -> dict[str, dict[str, Any]]:
    """Return the recall of pairs from Jaccard index 0.8, and how many were merged below 0.5."""
    cleaner = NearDuplicates(threshold=THRESHOLD)
    texts = [text for pair in pairs for text in pair]
    report = learn(cleaner, texts)
    fell_for = cleaner._fell_for
    wanted = met = wrong = 0
    for number, pair in enumerate(pairs):
        one, two = 2 * number, 2 * number + 1
        index = jaccard(*(ngram_hashes(text) for text in pair))
        merged = fell_for[one] != one or fell_for[two] != two
        wanted += index >= THRESHOLD
        met += index >= THRESHOLD and merged
    for number in np.flatnonzero(fell_for != np.arange(fell_for.size)).tolist():
        other = int(fell_for[number])
        wrong += jaccard(ngram_hashes(texts[number]), ngram_hashes(texts[other])) < 0.5
    return {
        "pairs": value(wanted, "pairs"),
        "recall": value(met / max(1, wanted), "share"),
        "predicted_recall": value(report.predicted_recall, "share"),
        "audited_recall": value(report.audited_recall, "share"),
        "merged_below_0.5": value(wrong, "documents"),
    }


def value(number: Any, unit: str) -> dict[str, Any]:
    """Return one reading as a metric."""
    return {"value": number, "low": number, "high": number, "unit": unit}


def learn(cleaner: Any, texts: list[str]) -> Any:
    """Return the report of a cleaner on texts of one source."""
    for index, text in enumerate(texts):
        cleaner.learn(0, index, text)
    return cleaner.finish()


def ours(path: Path, cores: int) -> dict[str, Any]:
    """Read, sketch and cluster by Headrace; compile before, on a few words."""
    begin = time.perf_counter()
    learn(NearDuplicates(workers=1), ["a b c d e f", "a b c d e f"])
    prepared = time.perf_counter() - begin
    begin = time.perf_counter()
    cleaner = NearDuplicates(threshold=THRESHOLD, workers=cores)
    for index, document in enumerate(read_documents(str(path))):
        cleaner.learn(0, index, document.text)
    learned = time.perf_counter() - begin
    report = cleaner.finish()
    return {
        "s": time.perf_counter() - begin,
        "learn_s": learned,
        "compile_s": prepared,
        "cpu_s": time.process_time(),
        "clusters": cleaner._fell_for.tolist(),
        "audited": report.audited_recall,
    }


DAFT = """
import json, sys, time
import daft
from daft import col
path, bands, rows = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
begin = time.perf_counter()
frame = daft.read_parquet(path).with_column("row", col("id"))
text = col("text").normalize(remove_punct=True, lowercase=True, nfd_unicode=False, white_space=True)
frame = frame.with_column("sketch", text.minhash(num_hashes=bands * rows, ngram_size=5))
columns = frame.select("row", "sketch").collect().to_arrow()
import numpy as np
ids = columns["row"].to_numpy()
values = columns["sketch"].combine_chunks().flatten().to_numpy().reshape(len(ids), bands, rows)
parent = np.arange(len(ids))
def root(x):
    while parent[x] != x:
        parent[x] = parent[parent[x]]
        x = parent[x]
    return x
for band in range(bands):
    keys = values[:, band].copy().view([("", values.dtype)] * rows).ravel()
    order = np.argsort(keys, kind="stable")
    same = np.flatnonzero(keys[order][1:] == keys[order][:-1])
    for place in same.tolist():
        a, b = root(order[place]), root(order[place + 1])
        parent[max(a, b)] = min(a, b)
out = np.empty(len(ids), int)
out[ids] = ids[[root(x) for x in range(len(ids))]]
print(json.dumps({"s": time.perf_counter() - begin, "clusters": out.tolist()}))
"""
"""Daft's own sketches, its bands cut and united by numpy: Daft joins them, which is slower."""


def daft(path: Path, python: Path) -> dict[str, Any]:
    """Compute sketches by Daft, with bands that have the same recall."""
    bands = NearDuplicates(threshold=THRESHOLD).bands
    words = [str(python), "-c", DAFT, str(path), str(bands.bands), str(bands.rows)]
    return json.loads(subprocess.run(words, capture_output=True, text=True, check=True).stdout)


def datatrove(path: Path, scratch: Path) -> dict[str, Any]:
    """Run the four stages of datatrove over one file, with bands that have the same recall."""
    from datatrove.executor import LocalPipelineExecutor  # pyright: ignore
    from datatrove.pipeline.dedup import (  # pyright: ignore
        MinhashDedupBuckets,
        MinhashDedupCluster,
        MinhashDedupFilter,
        MinhashDedupSignature,
    )
    from datatrove.pipeline.dedup.minhash import MinhashConfig  # pyright: ignore
    from datatrove.pipeline.readers import ParquetReader  # pyright: ignore
    from datatrove.pipeline.writers import JsonlWriter  # pyright: ignore
    from datatrove.utils.word_tokenizers import load_word_tokenizer  # pyright: ignore

    bands = NearDuplicates(threshold=THRESHOLD).bands
    config = MinhashConfig(n_grams=5, num_buckets=bands.bands, hashes_per_bucket=bands.rows, seed=1)
    folder = {name: str(scratch / name) for name in ("a", "b", "c", "d")}
    reader = ParquetReader(str(path.parent), glob_pattern=path.name)
    stages = [
        ([reader, MinhashDedupSignature(folder["a"], config)], 1),
        ([MinhashDedupBuckets(folder["a"], folder["b"], config=config)], bands.bands),
        ([MinhashDedupCluster(folder["b"], folder["c"], config=config)], 1),
        ([reader, MinhashDedupFilter(folder["c"]), JsonlWriter(folder["d"], compression=None)], 1),
    ]
    load_word_tokenizer("en").word_tokenize("one two")  # which imports and makes it
    begin = time.perf_counter()
    for number, (pipeline, tasks) in enumerate(stages):
        logs = str(scratch / f"logs{number}")
        LocalPipelineExecutor(pipeline, tasks=tasks, workers=1, logging_dir=logs).run()
    took = time.perf_counter() - begin
    stays = [json.loads(line) for file in (scratch / "d").iterdir() for line in file.open()]
    left = {int(row["id"]) for row in stays}
    return {"s": took, "left": sorted(left)}


def speed(args: argparse.Namespace) -> dict[str, Any]:
    """Time each side on one Parquet file of passages; all are held against exact indices."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    texts = passages(args.data, args.passages)
    megabytes = sum(len(text.encode()) for text in texts) / 1e6
    metrics: dict[str, Any] = {"text": value(megabytes, "MB")}
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch) / "passages.parquet"
        ids = [str(n) for n in range(len(texts))]
        numbers = pa.array(range(len(texts)))
        pq.write_table(pa.table({"text": texts, "id": numbers}), path)
        sides: dict[str, Callable[[], dict[str, Any]]] = {"headrace": lambda: alone("ours", path)}
        if args.daft_python:
            sides["daft"] = lambda: daft(path, args.daft_python)
        if receipts.installed("datatrove"):
            other = Path(scratch) / "other.parquet"
            pq.write_table(pa.table({"text": texts, "id": ids}), other)
            sides["datatrove"] = lambda: alone("datatrove", other)
        pairs = similar_pairs(texts)
        metrics["pairs"] = value(len(pairs), "pairs")
        times: dict[str, list[float]] = {name: [] for name in sides}
        for _ in range(args.rounds):
            for name, run in sides.items():
                outcome = run()
                times[name].append(megabytes / outcome["s"])
                metrics[f"{name}_recall"] = value(share_met(outcome, pairs), "share")
                for extra in ("compile_s", "learn_s", "cpu_s"):
                    if extra in outcome:
                        metrics[f"{name}_{extra}"] = value(outcome[extra], "s")
        metrics |= {f"{n}_mb_per_s": receipts.spread(t, "MB/s") for n, t in times.items()}
    return metrics


def alone(side: str, path: Path) -> dict[str, Any]:
    """Run a side in a process of its own, on the cores of this one."""
    words = [
        sys.executable,
        str(HERE / "data_dedup.py"),
        "side",
        "--side",
        side,
        "--path",
        str(path),
    ]
    words += ["--cores", str(len(os.sched_getaffinity(0)))]
    ended = subprocess.run(words, capture_output=True, text=True, check=True)
    return json.loads(ended.stdout.splitlines()[-1])


def similar_pairs(texts: list[str]) -> list[tuple[int, int]]:
    """Return all pairs that share three n-grams of some and have a Jaccard index from 0.8."""
    hashes = [ngram_hashes(text) for text in texts]
    first: dict[int, list[int]] = {}
    for number, own in enumerate(hashes):
        for least in own[: min(8, own.size)].tolist():
            first.setdefault(least, []).append(number)
    near = {(a, b) for group in first.values() for a in group for b in group if a < b}
    return sorted(p for p in near if jaccard(hashes[p[0]], hashes[p[1]]) >= THRESHOLD)


def share_met(outcome: dict[str, Any], pairs: list[tuple[int, int]]) -> float:
    """Return the share of similar pairs of which not both stay."""
    if "left" in outcome:
        left = set(outcome["left"])
    else:
        left = {n for n, kept in enumerate(outcome["clusters"]) if kept == n}
    return sum(not (a in left and b in left) for a, b in pairs) / max(1, len(pairs))


def recall(args: argparse.Namespace) -> dict[str, Any]:
    """Judge generated pairs, and the rows of neardup.jsonl where there are some."""
    generated = judge([*generated_pairs(args.pairs)])
    metrics = {f"generated_{name}": metric for name, metric in generated.items()}
    labelled = sorted(args.data.rglob("neardup.jsonl")) if args.data else []
    if labelled:
        rows = [json.loads(line) for line in labelled[0].open()]
        base = {row["cluster"]: row["text"] for row in rows if row["kind"] == "base"}
        pairs = [(base[r["cluster"]], r["text"]) for r in rows if r["kind"] != "base"]
        metrics |= {f"labelled_{name}": metric for name, metric in judge(pairs).items()}
    return metrics


class SeveralCleaners:
    """Let several cleaners learn each document, one after the other."""

    def __init__(self, *cleaners: Any) -> None:
        self._cleaners = cleaners

    def learn(self, source: int, index: int, text: str) -> None:
        """Learn a document."""
        for cleaner in self._cleaners:
            cleaner.learn(source, index, text)

    def finish(self) -> list[Any]:
        """Return the report of each."""
        return [cleaner.finish() for cleaner in self._cleaners]


def filters(args: argparse.Namespace) -> dict[str, Any]:
    """Time exact documents, exact paragraphs, the Bloom filter, and it behind the first of them."""
    texts = passages(args.data, args.passages)
    size = sum(len(text.encode()) for text in texts) / 1e6
    ngrams = count_ngrams(texts)
    learn(RepeatedPassages(ngrams=1000), ["one two"])  # compiles it
    metrics = {"text": value(size, "MB")}

    def bloom() -> RepeatedPassages:
        return RepeatedPassages(ngrams=ngrams, rate=FALSE_POSITIVES)

    sides: dict[str, Callable[[], Any]] = {
        "exact_documents": ExactDocuments,
        "exact_paragraphs": ExactParagraphs,
        "bloom": bloom,
        "exact_and_bloom": lambda: SeveralCleaners(ExactDocuments(), bloom()),
    }
    for name, make in sides.items():
        wall, cores = [], []
        for _ in range(args.rounds):
            cleaner, begin, cpu = make(), time.perf_counter(), time.process_time()
            learn(cleaner, texts)
            wall.append(size / (time.perf_counter() - begin))
            cores.append(size / (time.process_time() - cpu))
        metrics[f"{name}_mb_per_s"] = receipts.spread(wall, "MB/s")
        metrics[f"{name}_mb_per_cpu_s"] = receipts.spread(cores, "MB/s")
    return metrics


def memory(args: argparse.Namespace) -> dict[str, Any]:
    """Stream generated text of a size, and read the most memory that this process took.

    The growth is that of the second half of the text, while documents are learned. With
    `--evaluation` the text is decontaminated instead: of evaluation documents that have so many
    words together, one stands in each hundredth document of the text.
    """
    draw = random.Random(0)
    words = [f"w{draw.randrange(10**6)}" for _ in range(100_000)]
    size, index, begin = 0, 0, time.perf_counter()
    cleaner = Decontaminator(DecontaminationConfig()) if args.evaluation else NearDuplicates()
    exam = [f"e{draw.randrange(10**6)}" for _ in range(args.evaluation)]
    for at in range(0, len(exam), EVALUATION_WORDS):
        assert isinstance(cleaner, Decontaminator)
        cleaner.evaluate(" ".join(exam[at : at + EVALUATION_WORDS]))
    half: tuple[int, int] | None = None
    while size < args.gigabytes * 1e9:
        if half is None and size >= args.gigabytes * 5e8:
            half = index, peak_bytes()
        at = draw.randrange(len(words) - 600)
        text = f"{draw.randrange(10**9)} " + " ".join(words[at : at + 50 + index % 550])
        if exam and index % CONTAMINATED == 0:
            at = EVALUATION_WORDS * draw.randrange(len(exam) // EVALUATION_WORDS)
            text += ". " + " ".join(exam[at : at + EVALUATION_WORDS])
        cleaner.learn(0, index, text)
        size += len(text)
        index += 1
    assert half is not None
    growth = (peak_bytes() - half[1]) / (index - half[0])
    report = cleaner.finish()
    metrics = {
        "text": value(size / 1e9, "GB"),
        "documents": value(index, "documents"),
        "dropped": value(report.dropped_documents + report.cut_documents, "documents"),
        "counted": value(report.memory_bytes, "bytes"),
        "growth": value(growth, "bytes a document"),
        "peak": value(peak_bytes(), "bytes"),
        "seconds": value(time.perf_counter() - begin, "s"),
    }
    if isinstance(cleaner, NearDuplicates):
        metrics["predicted"] = value(cleaner.predict_bytes(index), "bytes")
    else:
        metrics["evaluation"] = value(len(exam), "words")
    return metrics


def peak_bytes() -> int:
    """Return the most memory that this process took until now."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=["speed", "recall", "filters", "memory", "side"])
    parser.add_argument("--data", type=Path)
    parser.add_argument("--passages", type=int, default=20_000)
    parser.add_argument("--pairs", type=int, default=10_000)
    parser.add_argument("--gigabytes", type=float, default=0.1)
    parser.add_argument(
        "--evaluation", type=int, default=0, help="words of evaluation sets; deduplicate without"
    )
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cores", type=int, default=2)
    parser.add_argument("--daft-python", type=Path, help="an interpreter that has daft")
    parser.add_argument("--side", choices=["ours", "datatrove"], help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--results", type=Path, default=receipts.ROOT / "results")
    args = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))[: args.cores]
    os.sched_setaffinity(0, cores)
    if args.what == "side":
        if args.side == "ours":
            print(json.dumps(ours(args.path, args.cores)))
            return
        with tempfile.TemporaryDirectory() as scratch:
            print(json.dumps(datatrove(args.path, Path(scratch))))
        return
    if args.what in ("speed", "filters") and args.data is None:
        parser.error(f"{args.what} needs --data DIR, a folder of text files")
    run = {"speed": speed, "recall": recall, "filters": filters, "memory": memory}[args.what]
    row = receipts.append(
        "data",
        run(args),
        results=args.results,
        kind="decontamination_memory" if args.evaluation else f"dedup_{args.what}",
        n=args.rounds,
        seeds=[0],
        cores=len(cores),
        daft=bool(args.daft_python),
    )
    print(json.dumps(row["metrics"], indent=1))


if __name__ == "__main__":
    main()

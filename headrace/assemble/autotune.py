"""Choose the attention backend that is fastest at a run's own shapes, by timing each.

Which kernel wins depends on the GPU, the versions, the sequence length, the heads and the mask, and
no rule predicts it. A plan with `attention = "measured"` has every exact backend of the catalogue
that can run it timed beside the baseline's. The trial uses one micro-batch of the run's own
sequences, its mask, its heads and its precision, compiled where the plan compiles. One time is what
a micro-batch spends in attention: the mask once, then forward and backward for every layer. In each
round every backend runs once, and the median over rounds counts.

The fastest is written into the plan as if it had been asked for: plan.toml names it, and a repeat
of that plan times nothing. The report keeps every time, which backends were refused and why, and
the kernels that the winner launches, because the baseline's backend is torch's own choice among
several. The result is kept for the user's other runs in a JSON file, under everything that it
depends on.

Left out: knobs of a backend, which keep their defaults; flags of the process that other techniques
set; and what lies around attention.
"""

import gc
import json
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from copy import copy
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, TypeGuard

import torch
from torch import Tensor

from headrace.assemble.build import make_build
from headrace.assemble.context import make_context
from headrace.assemble.sockets import Build, MicroBatch
from headrace.core.errors import ConfigError, HeadraceError, UnsupportedError
from headrace.core.files import write_whole
from headrace.core.progress import Progress
from headrace.core.remedy import Remedy, mend
from headrace.data.loader import collate
from headrace.data.prepared import Prepared
from headrace.model.attention import attending, check_mask, kernels_of
from headrace.parallel.first import by_first
from headrace.parallel.world import World
from headrace.plan.plan import Plan
from headrace.plan.technique import Catalogue, Stage, Technique, Unsupported, check_claims

BASELINE = "trunk"
"""The name of the baseline's own backend among the candidates, in stored results too."""
WARMUP, ROUNDS, CALLS = 2, 7, 3
"""Untimed calls, which compile; timed rounds over all backends; calls of a backend in a round."""
PATIENCE_S, LONG_S = 20.0, 1.0
"""Seconds after which no new round begins; seconds of the slowest backend's micro-batch from which
a round makes one call of each backend."""
FORMAT = 1
"""The version of the file that keeps results; a file of another version is not read."""


def choose_attention(
    plan: Plan,
    catalogue: Catalogue | None,
    prepared: Prepared,
    world: World,
    device: torch.device,
    progress: Progress,
) -> tuple[Plan, dict[str, Any] | None]:
    """Return the plan with the fastest backend written in, and the times for the report.

    A plan that leaves the choice to its techniques is returned as it is, with None.

    Raises:
        ConfigError: there is no catalogue to choose from.
        UnsupportedError: no backend could run.
    """
    if plan.attention == "plan":
        return plan, None
    if catalogue is None:
        raise ConfigError(
            "attention = 'measured' chooses among techniques, and none were given",
            Remedy(text="train.run(plan, progress=progress, catalogue=catalogue())")
            | mend("attention=plan"),
        )
    plans, refused = candidates(plan, catalogue, device)

    def find() -> dict[str, Any]:
        result = _find(plans, prepared, device, progress)
        result["refused"] = {**refused, **result["refused"]}
        progress.note(format_result(result))
        return result

    result = by_first(world, find)
    return plans[result["chosen"]], result


def candidates(
    plan: Plan, catalogue: Catalogue, device: torch.device
) -> tuple[dict[str, Plan], dict[str, str]]:
    """Return the plan with each backend that can run it, by name, and why others cannot."""
    plan, refused = plan.replaced(attention="plan"), {}
    plans = {BASELINE: plan}
    for name, kind in catalogue.techniques.items():
        attends = "parts.attend" in kind.claims and "parts.mixer" not in kind.claims
        if not attends or kind.axes or kind.equality != "exact":
            continue
        try:
            technique = kind()
            one = plan.replaced(techniques={**plan.techniques, name: technique}).with_keys({})
            check_claims(one.techniques.values())
        except ConfigError as error:
            refused[name] = _first_line(error)
            continue
        answer = technique.supports(make_context(one, device))
        if isinstance(answer, Unsupported):
            refused[name] = answer.reason
        else:
            plans[name] = one
    return plans, refused


def format_result(result: Mapping[str, Any]) -> str:
    """Return one line about the chosen backend, the times and the backends that were refused."""
    times = sorted(result["milliseconds"].items(), key=lambda item: item[1]["median"])
    shown = ", ".join(f"{name} {time['median']:.3g} ms" for name, time in times)
    how = f"{'known from before' if result['cached'] else 'measured'}: {shown}"
    left = f"; not {', '.join(result['refused'])}" if result["refused"] else ""
    return f"attention by {result['chosen']} ({how if shown else 'no other runs here'}{left})"


# --- what is measured, and the results that are kept of it -------------------------------------


def cache_file() -> Path:
    """Return the file where results are kept between runs."""
    return Path.home() / ".cache" / "headrace" / "attention.json"


def _find(
    plans: Mapping[str, Plan], prepared: Prepared, device: torch.device, progress: Progress
) -> dict[str, Any]:
    """Return the stored result for these circumstances, or measure and store a new one."""
    build = make_build(plans[BASELINE], prepared, World(), device, until=Stage.PARTS)
    work = _first_rows(build)
    at = _circumstances(build, work, plans)
    key, known = json.dumps(at, sort_keys=True), _read()
    if _is_whole(old := known.get(key), plans):
        return {**old, "at": at, "cached": True}
    result = measure(build, work, plans, progress)
    _write({**known, key: result})
    return {**result, "at": at, "cached": False}


def _is_whole(old: Any, plans: Mapping[str, Plan]) -> TypeGuard[dict[str, Any]]:
    """Return whether a stored entry has all that `measure` returns and chooses one of `plans`."""
    types = {"chosen": str, "kernels": list, "milliseconds": dict, "refused": dict}
    if not isinstance(old, dict) or any(type(old.get(n)) is not types[n] for n in types):
        return False
    times = [time if type(time) is dict else {} for time in old["milliseconds"].values()]
    numbers = [type(time.get(n)) for time in times for n in ("median", "low", "high")]
    texts = all(type(text) is str for text in (*old["kernels"], *old["refused"].values()))
    return old["chosen"] in plans and texts and {*numbers} <= {int, float}


def _first_rows(build: Build) -> MicroBatch:
    """Return a micro-batch of the run's own text, on the device."""
    packer = build.pack(build, build.prepared.train)
    rows = [packer.row(0, n % packer.units[0]) for n in range(build.plan.micro_rows)]
    return build.place(build, collate(rows, segments=build.mask.document))


def _circumstances(build: Build, work: MicroBatch, plans: Mapping[str, Plan]) -> dict[str, Any]:
    """Return everything that the times depend on, as JSON values by name."""
    plan, config, segments_BT = build.plan, build.config, work.rows.segments_BT
    documents = 0 if segments_BT is None else int((segments_BT[:, -1] + 1).sum())
    return {
        "device": build.context.device_name,
        "torch": torch.__version__,
        "cudnn": torch.backends.cudnn.version(),
        "rows": plan.micro_rows,
        "tokens_of_a_row": plan.data.sequence_length,
        "documents": documents,
        "layers": len(attending(config, build.parts.mixer, build.parts.attend)),
        "heads": _share(config.heads, build),
        "kv_heads": _share(config.resolved_kv_heads, build),
        "head_dim": config.resolved_head_dim,
        "precision": build.context.precision,
        "mask": repr(build.mask),
        "compiled_by": _compiler(plan),
        "candidates": {n: repr(p.techniques.get(n, "")) for n, p in plans.items()},
    }


def _share(heads: int, build: Build) -> int:
    """Return how many of the heads one tensor rank has."""
    return max(1, heads // build.plan.mesh.tensor)


def _compiler(plan: Plan) -> str:
    """Return the name of the backend that compiles the model; empty where nothing does."""
    compiling = [t for t in plan.techniques.values() if "compiled" in t.composes]
    return getattr(compiling[0], "backend", "inductor") if compiling else ""


def _read() -> dict[str, Any]:
    """Return all stored results; none where the file is damaged or of another format."""
    try:
        kept = json.loads(cache_file().read_bytes())
    except (OSError, ValueError, RecursionError):
        return {}
    if not isinstance(kept, dict) or kept.get("format") != FORMAT:
        return {}
    return kept["found"] if isinstance(kept.get("found"), dict) else {}


def _write(results: Mapping[str, Any]) -> None:
    """Store results by writing another file and renaming it.

    A disk that cannot be written does not end the run.
    """
    path = cache_file()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        write_whole(path, json.dumps({"format": FORMAT, "found": results}, indent=1))


# --- the clock -------------------------------------------------------------------------------


@dataclass
class Trial:
    """A trial is one backend that can be timed on a micro-batch of the run."""

    build: Build
    """the build, with this backend in its parts"""
    parts: list[tuple[int, Callable[[], Any]]]
    """(how often a micro-batch makes the call, the call)"""
    launched: Callable[[], list[str]]
    """returns the names of the kernels that a call launches"""

    def seconds(self, calls: int) -> float:
        """Return the seconds of a micro-batch's attention, as a mean over `calls` calls."""
        with ExitStack() as flags:
            for enter in self.build.runtime:
                flags.enter_context(enter())
            device = self.build.device
            return sum(count * _seconds(device, what, calls) for count, what in self.parts)


def measure(
    build: Build, work: MicroBatch, plans: Mapping[str, Plan], progress: Progress
) -> dict[str, Any]:
    """Time each backend; return the times, the fastest one and why others could not run.

    Raises:
        UnsupportedError: no backend could run.
    """
    trials: dict[str, Trial] = {}
    refused: dict[str, str] = {}
    times: dict[str, list[float]] = {}
    tensors, rows = _tensors(build, work), work.ids_BT.size(0)
    try:
        for name, plan in plans.items():
            try:
                trials[name] = _trial(build, work, plan.techniques.get(name), tensors)
                for _ in range(WARMUP if len(plans) > 1 else 0):
                    trials[name].seconds(1)
            except (HeadraceError, RuntimeError, ValueError) as error:
                trials.pop(name, None)
                refused[name] = _first_line(error)
            if name in refused:
                _clean(build.device)  # it may have run out of memory
        if not trials:
            raise UnsupportedError(
                "no attention backend could run: "
                + "; ".join(f"{name}: {why}" for name, why in refused.items()),
                mend("attention=plan") | mend(f"batch.micro_sequences={max(1, rows // 2)}"),
            )
        if len(trials) > 1:
            times = _time_rounds(trials, progress)
        fastest = min(trials, key=lambda name: median(times.get(name, [0.0])))
        kernels = trials[fastest].launched()
    finally:
        trials.clear()
        _clean(build.device)
    return {
        "chosen": fastest,
        "kernels": kernels,
        "milliseconds": {
            name: {"median": median(seen), "low": min(seen), "high": max(seen)}
            for name, seen in times.items()
        },
        "refused": refused,
    }


def _time_rounds(trials: Mapping[str, Trial], progress: Progress) -> dict[str, list[float]]:
    """Return the milliseconds of each round, by backend."""
    began_s, calls = time.perf_counter(), 1
    times: dict[str, list[float]] = {name: [] for name in trials}
    for round_index in range(ROUNDS):
        progress.task("attention backends", round_index, ROUNDS)
        for name, trial in trials.items():
            times[name].append(1000 * trial.seconds(calls))
        if round_index == 0 and max(seen[0] for seen in times.values()) < 1000 * LONG_S:
            calls = CALLS
        if time.perf_counter() - began_s > PATIENCE_S:
            break
    return times


def _tensors(build: Build, work: MicroBatch) -> list[Tensor]:
    """Return random queries, keys, values and a gradient of the result, in the run's shapes."""
    config, (B, T) = build.config, work.ids_BT.shape
    draw = torch.Generator(build.device).manual_seed(0)
    heads, groups = _share(config.heads, build), _share(config.resolved_kv_heads, build)
    q, k, v, gradient = (
        torch.randn(B, T, n, config.resolved_head_dim, device=build.device, generator=draw)
        .to(build.dtype)
        .requires_grad_()
        for n in (heads, groups, groups, heads)
    )
    return [q, k, v, gradient.detach()]


def _trial(
    build: Build, work: MicroBatch, technique: Technique[Any] | None, tensors: list[Tensor]
) -> Trial:
    """Return the trial of a backend, with all the calls that a micro-batch makes of it.

    Raises:
        ConfigError, UnsupportedError: the backend does not support the run's mask.
    """
    own = replace(build, parts=copy(build.parts), runtime=[*build.runtime], notes={}, filled={})
    if technique is not None:
        technique.apply(own)
    attend, config = own.parts.attend, own.config
    check_mask(config, attend, own.mask)
    (*given, gradient), length = tensors, work.ids_BT.size(1)
    call: Callable[..., Tensor] = attend.__call__
    mask_of_rank = own.mask.of_heads(0, own.plan.mesh.tensor)
    if compiler := _compiler(own.plan):
        call = torch.compile(call, backend=compiler, dynamic=False)

    def prepare(spec: Any) -> Any:
        with own.autocast():
            return attend.prepare(spec, work.rows, length)

    def forward_backward(mask: Any) -> None:
        with own.autocast():
            mixed = call(*given, mask)
        torch.autograd.grad(mixed, given, gradient.to(mixed.dtype))

    parts: list[tuple[int, Callable[[], Any]]] = []
    masks = []
    with ExitStack() as flags:
        for enter in own.runtime:
            flags.enter_context(enter())
        layers_of = Counter(map(mask_of_rank.of_layer, attending(config, own.parts.mixer, attend)))
        for spec, layers in layers_of.items():
            masks.append(prepare(spec))
            parts += [(1, partial(prepare, spec)), (layers, partial(forward_backward, masks[-1]))]
    return Trial(own, parts, partial(_kernels, own, given, masks[0]))


def _kernels(build: Build, given: list[Tensor], mask: Any) -> list[str]:
    """Return what the backend launches: a GPU's kernels, or torch's attention operations."""
    (q, k, v), cuda = given, build.device.type == "cuda"
    with build.autocast(), ExitStack() as flags:
        for enter in build.runtime:
            flags.enter_context(enter())
        names = kernels_of(build.parts.attend, q, k, v, mask, only="CUDA" if cuda else "")
    return names if cuda else [name for name in names if "attention" in name]


def _seconds(device: torch.device, what: Callable[[], Any], calls: int) -> float:
    """Return the mean seconds of a call over `calls` in a row.

    The GPU's own clock is read, or on another device the host's.
    """
    if device.type == "cuda":
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        for _ in range(calls):
            what()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) / 1000 / calls
    began_s = time.perf_counter()
    for _ in range(calls):
        what()
    if device.type == "mps":
        torch.mps.synchronize()
    return (time.perf_counter() - began_s) / calls


def _clean(device: torch.device) -> None:
    """Free the memory of the trials and restart the count of the run's peak memory."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _first_line(error: BaseException) -> str:
    """Return the first line of an error, without torch's long text."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]

"""Make report.json: the numbers of what a run did, from its counters and signals."""

import os
from collections.abc import Mapping
from math import prod
from typing import Any

import torch
from torch import Tensor

from headrace.assemble import autotune as choose
from headrace.assemble import filled
from headrace.assemble.build import make_ledger
from headrace.assemble.sockets import Build
from headrace.core.errors import Diverged
from headrace.core.outcome import Outcome, outcome_of
from headrace.costs.count import model_flops_per_token
from headrace.costs.footprint import Footprint, make_footprint
from headrace.costs.hardware import lookup
from headrace.costs.ledger import Ledger
from headrace.costs.vision import model_flops_per_image
from headrace.costs.work import HostCopy, Stream
from headrace.data.chat.encode import other_template
from headrace.data.mix_count import MixCount, count_mix
from headrace.kernels.quantized_weight import QuantizedWeight
from headrace.observe import REPORT_FORMAT
from headrace.observe.compile_time import graph_breaks
from headrace.observe.signals import device_peak_bytes
from headrace.observe.waits import waits_of
from headrace.parallel.layout import local_of
from headrace.plan.doubts import doubts_of
from headrace.plan.gentler import usual_rate
from headrace.plan.plan import Plan
from headrace.plan.symptoms import saves_memory
from headrace.plan.technique import Evidence
from headrace.train.evaluate import doubts
from headrace.train.goal import Counters, reached
from headrace.train.run_folder import command_line

WORK_MEMORY = "activations, logits and work"
"""Name of the memory that is neither weights nor optimizer state nor, where measured, gradients."""


def remember(build: Build, counters: Counters) -> None:
    """Copy the notes of a build into the counters, for the report and for a resumed run."""
    notes = build.run_notes
    counters.guard = notes.guard or counters.guard
    timed, own = notes.timed_attention, notes.own_attention
    known = timed or counters.attention or {}
    if known.get("chosen") == choose.BASELINE and "parts.attend" in build.filled:
        known = {}  # in this resumed run a technique computes attention
    if own:
        known = {**known, "chosen": choose.BASELINE, **own}
    counters.attention = known or None


def summarize(
    build: Build,
    counters: Counters,
    *,
    status: str,
    message: str,
    error: str,
    evidence: Mapping[str, Evidence],
    last: filled.LastLook | None,
    tracked: Mapping[str, int] | None,
    rate: float | None,
    waits_s: list[float],
) -> dict[str, Any]:
    """Return everything that report.json holds except the findings and the sample.

    Args:
        build: the run.
        counters: how far it came.
        status: "done", "failed" or "interrupted".
        message: why it is not done; "" where it is.
        error: the class of the error that ended it; "" where none did.
        evidence: the evidence of every technique after the first step that counted a target.
        last: newer evidence from the end of the run; None where it was not collected.
        tracked: peak bytes by category from the memory tracker, on a CPU.
        rate: the median tokens per second of steady steps.
        waits_s: the seconds of each step's data wait.
    """
    plan, here, price = build.plan, build.context, build.plan.hardware.dollars_per_hour
    footprint = make_footprint(
        make_ledger(plan, here), here.device, here.precision, here.capability
    )
    ledger, owners = footprint.ledger, {**dict(footprint.ledger.owners()), **footprint.beside}
    step_s = plan.batch.tokens / rate if rate else None
    return {
        "format": REPORT_FORMAT,
        "name": plan.name,
        "status": status,
        "message": message,
        "error": error,
        "outcome": _outcome(build, counters, error).to_dict(),
        "goal": reached(plan, counters),
        "doubts": [{"reason": one.reason, "remedy": one.remedy.text} for one in doubts_of(plan)],
        "steps": counters.step,
        "tokens": counters.tokens,
        "wall_s": counters.wall_s,
        "steady_tokens_per_s": rate,
        "model_flops_utilization": _utilization(build, rate),
        "peak_memory_bytes": _memory(build, footprint, tracked),
        "memory_lines": [{"name": name, "bytes": bytes} for name, bytes in owners.items()],
        "memory_measured": _measured(build, tracked),
        "phase_s": counters.phase_s,
        "start_s": build.run_notes.start_s,
        "wasted_token_fraction": counters.wasted_tokens / max(1, counters.tokens),
        **_notes(build),
        "input_wait": waits_of(waits_s, step_s),
        "signals": _signals(build, ledger, last),
        "before": counters.before,
        "general": counters.general,
        "val": counters.val,
        "data": _data(build, counters),
        "dollars": None if price is None else counters.wall_s / 3600 * price,
        "skipped_steps": counters.skipped_steps,
        "techniques": _techniques(plan, {**evidence, **(last.evidence if last else {})}),
        "guard": counters.guard,
        "attention": counters.attention,
        "stream_sha256": build.loader.stream_sha256,
        "seed": plan.seed,
        "parameters": sum(prod(layout.shape) for layout in build.layouts.values()),
        "tokenizer": build.prepared.about_tokenizer,
        "command": " ".join(command_line()),
    }


def _techniques(plan: Plan, evidence: Mapping[str, Evidence]) -> dict[str, Any]:
    """Return the evidence of every technique by name, with what it does in one line."""
    return {
        name: {
            "active": one.active,
            "detail": one.detail,
            "numbers": dict(one.numbers),
            "line": plan.techniques[name].line(),
        }
        for name, one in evidence.items()
    }


def _notes(build: Build) -> dict[str, Any]:
    """Return spikes, compared copies, and the padding where the loss leaves other tokens out."""
    notes = build.run_notes
    facts = {"spikes": [spike.to_dict() for spike in notes.spikes], "copies": notes.copies}
    padding = getattr(build.loader.packer, "padding", 0.0)
    return {**facts, "padding_fraction": padding} if build.prepared.chat else facts


def _data(build: Build, counters: Counters) -> dict[str, Any]:
    """Return both sides of the text, the targets that an evaluation counts, and doubts of them."""
    tokens, targets = build.plan.eval.tokens, build.run_notes.validation_targets
    sides = build.prepared.sides(build.plan.data.validation).to_dict()
    last = counters.val[-1]["bits_per_byte"] if counters.val else None
    reasons = doubts(build, None if targets is None else tokens, targets, bits_per_byte=last)
    mix = mix_of(build, counters.step)
    rest = {"targets": targets, "doubts": [doubt.to_dict() for doubt in reasons]}
    rest["mixture"] = None if mix is None else mix.to_dict()
    talks = build.prepared.chat_fields
    if record := build.prepared.chat:
        other = other_template(record, build.plan.data.tokenizer)
        talks = {"chat": {**talks["chat"], "other_template_sha256": other}}
    return {**sides, **rest, **build.prepared.score_fields, **talks}


def mix_of(build: Build, steps: int | None = None) -> MixCount | None:
    """Return how much of each source so many steps of a run read; to its end without `steps`.

    It is None where nothing says how long the run is.
    """
    plan = build.plan
    rows = None if steps is None else plan.batches.before(steps) // plan.data.sequence_length
    tokens = [shards.tokens for shards in build.prepared.train]
    return count_mix(plan, tokens, build.loader.packer.units, rows)


def _outcome(build: Build, counters: Counters, error: str) -> Outcome:
    """Return whether the run learned or diverged."""
    vision = build.plan.vision
    return outcome_of(
        counters.val,
        counters.first_loss,
        counters.last_loss,
        step=counters.step,
        vocab=build.prepared.tokenizer.vocab if vision is None else vision.classes,
        ended_wild=error == Diverged.__name__,
    )


def _utilization(build: Build, rate: float | None) -> dict[str, Any]:
    """Return model FLOPs utilization with the peak that it is divided by."""
    hardware = lookup(build.context.device_name)
    peak = hardware.peak_flops(build.context.precision)
    vision = build.plan.vision
    if vision is None:
        per_token = model_flops_per_token(build.config, build.plan.data.sequence_length)
        formula = "tokens/s x (6 N + 12 L d T) / peak, N without the embedding (arXiv 2204.02311)"
    else:
        per_token = model_flops_per_image(vision)
        formula = "images/s x 6 x (weights x places of each convolution) / peak"
    share = rate * per_token / (peak * build.world.ranks) if rate and peak else None
    return {
        "value": share,
        "peak_flops": peak,
        "peak_source": hardware.source,
        "formula": formula,
        "model_flops_per_token": per_token,
    }


def _memory(
    build: Build, footprint: Footprint, tracked: Mapping[str, int] | None
) -> dict[str, Any]:
    """Return peak bytes: the allocator's on a GPU, the tracker's and the process's on a CPU."""
    instant, peak_bytes = footprint.ledger.peak()
    predicted = peak_bytes + sum(footprint.beside.values())
    peaks = device_peak_bytes(build.device)
    if peaks is None:
        import resource  # not every system has this module

        resident = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
        peaks = {"allocated": tracked["Total"] if tracked else None, "reserved": resident}
    method = "allocator" if build.device.type == "cuda" else "tracker"
    return {**peaks, "predicted": predicted, "predicted_at": instant, "method": method}


def _measured(build: Build, tracked: Mapping[str, int] | None) -> dict[str, int] | None:
    """Return the bytes of the peak by kind; what no tensor accounts for is `WORK_MEMORY`."""
    if tracked:
        peak = tracked["Total"]
        categories = {"parameters": "Parameter", "gradients": "Gradient", "optimizer": "Optstate"}
        sizes = {name: tracked.get(kind, 0) for name, kind in categories.items()}
    elif device := device_peak_bytes(build.device):
        peak = device["allocated"]
        states = [s for o in build.optimizers.values() for s in o.state.values()]
        buffers = [v for state in states for v in state.values() if isinstance(v, Tensor)]
        sizes = {
            "parameters": sum(p.nbytes for p in build.model.parameters()),
            "optimizer": sum(v.nbytes for v in buffers),
        }
    else:
        return None
    sizes = {name: size for name, size in sizes.items() if size}
    return {**sizes, WORK_MEMORY: peak - sum(sizes.values())}


def _signals(build: Build, ledger: Ledger, last: filled.LastLook | None) -> dict[str, Any]:
    """Return what the doctor reads beside phases, memory and rows; None where unavailable."""
    readings: dict[str, Any] = {
        "device": build.device.type,
        "capacity_bytes": None,
        "alloc_retries": None,
        "precision": build.context.precision,
        "graph_breaks": graph_breaks() if build.compiled else None,
        "saves_memory": [t.name() for t in build.techniques if saves_memory(t.symptoms)],
        "savings": _savings(build, ledger),
        "lost_techniques": last.lost if last else None,
        "unseen_techniques": last.unseen if last else None,
        "unreached": _unreached(last),
        "given": _given(build),
    }
    if build.device.type == "cuda":
        readings["capacity_bytes"] = torch.cuda.get_device_properties(build.device).total_memory
        readings["alloc_retries"] = torch.cuda.memory_stats(build.device)["num_alloc_retries"]
    elif build.device.type == "cpu":
        readings["capacity_bytes"] = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return readings


def _unreached(last: filled.LastLook | None) -> dict[str, dict[str, list[str]]]:
    """Return by technique which of its parts learned nothing, beside those that did.

    A technique all of whose parts learned has no entry.
    """
    parts = last.reached if last else {}
    return {
        technique: {
            "parts": [name for name, did in reached.items() if not did],
            "others": [name for name, did in reached.items() if did],
        }
        for technique, reached in parts.items()
        if not all(reached.values())
    }


def _given(build: Build) -> dict[str, Any] | None:
    """Return the learning rate over given weights, and what is usual; None of random weights.

    "fp32_bytes" are those of frozen weights that bf16 arithmetic reads as bf16 in every step.
    Where pairs are compared, no rate is judged: the validation loss is not what they lessen.
    """
    plan, frozen = build.plan, [p for p in build.model.parameters() if not p.requires_grad]
    if not plan.model.pretrained:
        return None
    wide = [p for p in map(local_of, frozen) if not isinstance(p, QuantizedWeight)]
    wide = [p for p in wide if p.dtype == torch.float32 and build.context.precision == "bf16"]
    owners = [name for name, t in plan.techniques.items() if t.usual_rate is not None]
    judged = plan.data.chat is None or plan.data.chat.kind != "preference"
    return {
        "trains": owners[0] if owners else "all weights",
        "lr": plan.optimizer.lr,
        "usual_lr": usual_rate(plan) if judged else None,
        "fp32_bytes": sum(p.nbytes for p in wide if p.dim() > 1),
    }


def _savings(build: Build, ledger: Ledger) -> dict[str, dict[str, float]]:
    """Return what each technique that trades time for memory saves and costs, by the ledger.

    "bytes" is what it takes off the peak. "again" is the share of a step's FLOPs that only it adds.
    "moved" is the bytes per step that it recomputes or copies over the host's link.
    """
    savings, plan = {}, build.plan

    def moved(of: Ledger) -> float:
        pieces = of.work.values()
        streams = (w for w in pieces if isinstance(w, Stream) and w.phase == "recompute")
        copies = (w for w in pieces if isinstance(w, HostCopy))
        return sum(w.bytes * w.count for w in (*streams, *copies))

    for name in (t.name() for t in build.techniques if saves_memory(t.symptoms)):
        others = {n: t for n, t in plan.techniques.items() if n != name}
        without = make_ledger(plan.model_copy(update={"techniques": others}), build.context)
        savings[name] = {
            "bytes": without.peak()[1] - ledger.peak()[1],
            "again": 1.0 - without.flops_per_token() / ledger.flops_per_token(),
            "moved": moved(ledger) - moved(without),
        }
    return savings

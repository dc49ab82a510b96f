"""Render findings of the signals of a run or of a watched loop."""

from collections.abc import Mapping
from typing import Any

from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.costs.machine import PROBE
from headrace.doctor.findings import PASSES, Finding, Kind
from headrace.doctor.words.described import Describe, Words

NO_KERNELS = "kernels: which of them take the time is told by a trace"
HOST_SHARES = "of operations' own time {}"


def _phase(finding: Finding, facts: Any) -> Words:
    name = finding.bottleneck
    evidence = f"{format_seconds(facts['spent_s'])} of {format_seconds(facts['total_s'])} measured"
    missing = ""
    if name == PASSES:
        evidence += (
            f": forward {format_seconds(facts['forward_s'])}, "
            f"backward {format_seconds(facts['backward_s'])}"
        )
        missing = "matrix products, attention and memory-bound work are not told apart"
    if wait := facts.get("wait"):
        evidence += (
            f"; wait p50 {format_seconds(wait['p50_s'])}, p99 {format_seconds(wait['p99_s'])}, "
            f"{wait['stalled_steps']} stalled steps"
        )
    sentence = f"{name[0].upper()}{name[1:]} took {finding.share:.1%} of the measured time."
    return sentence, evidence, missing


def _peak_memory(finding: Finding, facts: Any) -> Words:
    evidence = f"predicted {format_bytes(facts['predicted_bytes'])}"
    if "measured_bytes" in facts:
        off = facts["predicted_bytes"] / facts["measured_bytes"] - 1
        measured = format_bytes(facts["measured_bytes"])
        evidence += f", measured {measured} by the {facts['method']} ({off:+.0%})"
    sentence = (
        f"Most of the peak memory is {facts['owner']}: {finding.share:.0%} of the prediction."
    )
    return sentence, evidence, ""


def _tokens_without_target(finding: Finding, facts: Any) -> Words:
    share, padded = finding.share, facts["padding_share"]
    evidence = f"of {facts['tokens']} tokens"
    if padded > share:
        evidence += f"; {padded:.1%} are padding, and the loss counts {padded - share:.1%}"
    if facts.get("masks_prompts"):
        known = facts["padded_share"]
        are = "no attention_mask tells them from padding"
        are = are if known is None else f"{known:.1%} are padding"
        evidence += f"; masked prompts are no waste, and {are}"
    return f"{share:.1%} of the tokens had no target.", evidence + _packing(facts), ""


def _packing(facts: Any) -> str:
    """Return what the packing ledger says of the run's rows; "" where it was not counted."""
    if (counted := facts.get("packing")) is None:
        return ""
    rows = f"; rows of {counted['policy']} are {counted['policy_padding']:.2%} padding"
    best = f", those of {counted['best_policy']} {counted['best_padding']:.2%}"
    return rows + (best if counted["best_policy"] != counted["policy"] else "")


# --- what is wrong ---------------------------------------------------------------------------


def _too_few_steps(finding: Finding, facts: Any) -> Words:
    evidence = f"{facts['steps']} of at least {facts['fewest']}"
    return "Too few steady steps were measured to judge them.", evidence, "everything"


def _out_of_memory(finding: Finding, facts: Any) -> Words:
    return "The run ended because the memory was full.", facts["message"], ""


def _ended_not_finite(finding: Finding, facts: Any) -> Words:
    return (
        "The run ended because a loss or a gradient was not finite.",
        facts["message"],
        "which layer: the first whose output or gradient is not finite",
    )


def _diverged(finding: Finding, facts: Any) -> Words:
    places = {"last": "at the end", "first": "at the start", "guess": "of a uniform guess"}
    known = {name: facts[f"{name}_nats"] for name in places}
    parts = [f"{nats:.4g} nats {places[name]}" for name, nats in known.items() if nats is not None]
    return f"The run {facts['sentence']}.", "loss " + ", ".join(parts), ""


def _untrained(finding: Finding, facts: Any) -> Words:
    return (
        f"{finding.share:.0%} of the optimizer's parameters are not trained.",
        "none of them had a gradient in any step that was looked at",
        "which: those whose grad is None before optimizer.step",
    )


def _inactive(finding: Finding, facts: Any) -> Words:
    names = ", ".join(facts["names"])
    return f"{names} was asked for and does nothing.", "its evidence at the end of the run", ""


SHOWN_PARTS = 4
"""Names of parts that a reader sees."""


def _unreached(finding: Finding, facts: Any) -> Words:
    parts, count = facts["parts"], len(facts["parts"])
    total = count + len(facts["others"])
    more = f" and {count - SHOWN_PARTS} more" if count > SHOWN_PARTS else ""
    return (
        f"{count} of {total} adapters of {facts['technique']} learn nothing.",
        f"no gradient moved {', '.join(parts[:SHOWN_PARTS])}{more}",
        "",
    )


def _above_the_start(finding: Finding, facts: Any) -> Words:
    rate, usual = facts["lr"], facts["usual_lr"]
    evidence = (
        f"{facts['lowest_nats']:.4g} nats at best, {facts['before_nats']:.4g} before the first "
        f"step; optimizer.lr = {rate:g}, and for {facts['trains']} {usual:.2g} is usual"
    )
    sentence = "The loss rose above where it began, as it does where the learning rate is too high."
    return sentence, evidence, ""


def _forgot(finding: Finding, facts: Any) -> Words:
    before, after = facts["before_nats"], facts["after_nats"]
    evidence = f"{before:.4g} -> {after:.4g} nats on {facts['source']}"
    if "lr" in facts:
        evidence += f"; {facts['trains']} at optimizer.lr = {facts['lr']:g}"
    sentence = f"The model forgets: its loss on a general text rose by {after / before - 1:.1%}."
    return sentence, evidence, "what text of its kind among data.sources would keep"


def _overfits(finding: Finding, facts: Any) -> Words:
    step, steps = facts["step"], facts["steps"]
    lowest, last = facts["lowest_nats"], facts["last_nats"]
    evidence = (
        f"validation {lowest:.4g} -> {last:.4g} nats since step {step} of {steps}, after "
        f"{facts['best_epochs']:.2g} of {facts['epochs']:.2g} passes over the text, while the "
        "training loss fell"
    )
    sentence = f"The model overfits: its validation loss rose by {last / lowest - 1:.1%}."
    return sentence, evidence, "how far more text would have carried it"


def _other_template(finding: Finding, facts: Any) -> Words:
    run, own = (facts[f"{whose}_sha256"][:12] for whose in ("run", "own"))
    return (
        "Conversations were written by another chat template than the tokenizer's own.",
        f"the run's is {run}, the tokenizer's {own}; chat and exports write by the run's",
        "whether the given weights knew the tokenizer's own",
    )


def _wide_base(finding: Finding, facts: Any) -> Words:
    takes, whole = (format_bytes(facts[f"{what}_bytes"]) for what in ("fp32", "capacity"))
    sentence = "Frozen weights are held in fp32, and every step reads them as bf16."
    return (
        sentence,
        f"{takes} of {whole}; bf16 holds them in half",
        "what their cast takes of a step",
    )


def _relapsed(finding: Finding, facts: Any) -> Words:
    evidence = (
        f"{facts['back']} of {facts['steps']} steps, {facts['in_a_row']} or more in a row, lie far "
        f"above what had been reached, up to {facts['highest_nats']:.4g}; the first has "
        f"{facts['first_nats']:.4g}"
    )
    sentence = "The loss rose again and stayed up, as it does where the learning rate is too high."
    return sentence, evidence, ""


def _rising(finding: Finding, facts: Any) -> Words:
    last, first = facts["last_nats"], facts["first_nats"]
    return "The loss rises.", f"{last:.4g} in the last quarter, {first:.4g} in the first", ""


def _spikes(finding: Finding, facts: Any) -> Words:
    evidence = (
        f"losses jump in {facts['loss_jumps']} steps and gradient norms in {facts['norm_jumps']}, "
        f"by more than {facts['sigmas']:g} deviations of the steps before them"
    )
    return "Loss or gradients jump.", evidence, ""


def _lost_steps(finding: Finding, facts: Any) -> Words:
    evidence = f"{facts['lost']} of {facts['steps']} steps"
    return "Losses or gradients are not finite again and again.", evidence, ""


def _slower_recipe(finding: Finding, facts: Any) -> Words:
    seeds = "one run of each, and a seed moves the tokens by a few percent"
    if facts["repeats"] > 1:
        seeds = (
            f"{facts['repeats']} runs of this recipe, whose tokens differ by "
            f"{facts['noise_share']:.0%} at most"
        )
    evidence = (
        f"{facts['run']} reached {facts['bits_per_byte']:.3f} bits per byte after "
        f"{format_count(facts['its_tokens'])} of this run's {format_count(facts['tokens'])} "
        f"tokens; it has {facts['differences']}"
    )
    sentence = f"Another recipe came as far with {finding.share:.0%} fewer tokens."
    return sentence, evidence, f"seeds: {seeds}"


# --- what takes time -------------------------------------------------------------------------


def _of_a_step(facts: Any) -> str:
    return f"{format_seconds(facts['spent_s'])} of a step of {format_seconds(facts['step_s'])}"


def _input_wait(finding: Finding, facts: Any) -> Words:
    return f"The device waits for data in {finding.share:.0%} of the time.", _of_a_step(facts), ""


def _communication(finding: Finding, facts: Any) -> Words:
    sentence = f"Communication that nothing hides takes {finding.share:.0%} of the time."
    missing = "transfer and waiting for other ranks are told apart by a trace of every rank"
    return sentence, _of_a_step(facts), "" if facts["waits_apart"] else missing


def _recompiles(finding: Finding, facts: Any) -> Words:
    evidence = f"{facts['steps']} steps, {format_seconds(facts['more_s'])} more than others"
    sentence = f"Steps compile again after the first ones: {finding.share:.0%} of the time."
    return sentence, evidence, "which frame: headrace explain PLAN --graph"


def _tiny_operations(finding: Finding, facts: Any) -> Words:
    evidence = (
        f"{facts['operations']} operations of a step are views or touch a page at most: "
        f"{format_seconds(facts['host_s'])} at what one costs here"
    )
    sentence = f"Operations that do next to nothing take {finding.share:.0%} of the time."
    return sentence, evidence, "which: a trace tells"


def _graph_breaks(finding: Finding, facts: Any) -> Words:
    missing = "what they cost: a trace tells; where they are: headrace explain PLAN --graph"
    return "Compiled code is broken into pieces.", f"{facts['graph_breaks']} graph breaks", missing


def _wide_matmuls(finding: Finding, facts: Any) -> Words:
    share, times = facts["flops_share"], facts["times_as_wide"]
    evidence = (
        f"of their FLOPs in the step that was looked at; a dtype {times:g} times as wide is so "
        "much slower at least"
    )
    sentence = f"{share:.0%} of the products are computed wider than the plan says."
    return sentence, evidence, "what else products could lose: a trace tells"


def _wasted_tokens(finding: Finding, facts: Any) -> Words:
    sentence = f"{finding.share:.0%} of the tokens are computed and count in no loss."
    counted = facts.get("counted_share")
    counts = "" if counted is None else f"; {counted:.1%} of all tokens have a target that counts"
    return sentence, "padding, or tokens whose target is left out" + counts + _packing(facts), ""


def _needless_savings(finding: Finding, facts: Any) -> Words:
    evidence = (
        f"{format_bytes(facts['reserved_bytes'])} held and {format_bytes(facts['more_bytes'])} "
        f"more without it, of {format_bytes(facts['capacity_bytes'])}; {facts['work_share']:.0%} "
        "of the work is done again"
    )
    sentence = f"{', '.join(facts['names'])} trades time for memory that is free."
    return sentence, evidence, "what it costs in time: leave it out and compare"


def _retries(facts: Any) -> str:
    return (
        f"{format_bytes(facts['reserved_bytes'])} reserved of "
        f"{format_bytes(facts['capacity_bytes'])}; the allocator began anew "
        f"{facts['retries']} times"
    )


def _in_pieces(finding: Finding, facts: Any) -> Words:
    sentence = f"{finding.share:.0%} of the memory is in pieces that nothing fits."
    return sentence, _retries(facts), ""


def _memory_full(finding: Finding, facts: Any) -> Words:
    return "The memory is full.", _retries(facts), ""


def _clock_limited(finding: Finding, facts: Any) -> Words:
    ran, could = (facts[name] / 1e6 for name in ("clock_hz", "highest_clock_hz"))
    evidence = (
        f"{ran:.0f} of {could:.0f} MHz, in {facts['limited_share']:.0%} of {facts['samples']} "
        f"samples over {format_seconds(facts['watched_s'])}; at most {facts['temperature_c']} C"
    )
    sentence = f"The GPU's clock was held down by {facts['why']}."
    return sentence, evidence, "what the step would gain: memory's clock is another"


# --- what binds the steps --------------------------------------------------------------------


def _name(facts: Mapping[str, Any]) -> str:
    return {"cuda": "GPU", "cpu": "CPU"}.get(facts["device"], "device")


def _resources(facts: Any) -> str:
    """Return the numbers of every resource, in one line."""
    parts = []
    if "work_s" in facts:
        parts.append(
            f"its work takes {format_seconds(facts['work_s'])} of a step of "
            f"{format_seconds(facts['median_s'])} by {facts['rates']}: products and attention "
            f"{facts['computes_share']:.1%}, moving bytes {facts['moves_share']:.1%}"
        )
    if "launches_s" in facts:
        parts.append(f"launching it takes {format_seconds(facts['launches_s'])} by the same")
    if "peak_share" in facts:
        parts.append(f"{facts['peak_share']:.1%} of the device's peak")
    if "slack_share" in facts:
        parts.append(f"the host waited for the device in {facts['slack_share']:.1%} of a step")
    if "dry_share" in facts:
        dry = facts["dry_share"]
        parts.append(f"{dry:.0%} of the steps began when the device had nothing left to do")
    return "; ".join(parts)


def _gpu_idles(finding: Finding, facts: Any) -> Words:
    sentence = f"Launch overhead: the GPU idles {finding.share:.0%} of the step."
    return sentence, _resources(facts), ""


def _host_never_ahead(finding: Finding, facts: Any) -> Words:
    sentence = "The host is never ahead of the device, which may wait for it."
    return sentence, _resources(facts), "how long the device idles: a trace tells"


def _operation_overhead(finding: Finding, facts: Any) -> Words:
    sentence = (
        f"Operation overhead: the {_name(facts)} computes nothing in {finding.share:.0%} of the "
        "step."
    )
    return sentence, _resources(facts), NO_KERNELS


def _moves_bytes(finding: Finding, facts: Any) -> Words:
    sentence = (
        f"Memory bandwidth: work that only moves bytes takes {finding.share:.0%} of the step."
    )
    return sentence, _resources(facts), NO_KERNELS


def _small_matmuls(finding: Finding, facts: Any) -> Words:
    peak = facts["peak_share"]
    sentence = f"Products are too small for the device: it reaches {peak:.1%} of its peak."
    return sentence, _resources(facts), NO_KERNELS


def _slow_kernels(finding: Finding, facts: Any) -> Words:
    busy = facts["busy_share"]
    why = "the host is ahead of it" if busy is None else f"a trace saw it busy for {busy:.0%}"
    sentence = f"Kernels take {facts['times']:.1f} times as long as the device's rates say."
    return sentence, f"{why}; {_resources(facts)}", NO_KERNELS


def _computes(finding: Finding, facts: Any) -> Words:
    sentence = f"Computation: matrix products and attention take {finding.share:.0%} of the step."
    return sentence, _resources(facts), NO_KERNELS


def _steps(facts: Any) -> str:
    return f"median step {format_seconds(facts['median_s'])} over {facts['steps']} steps"


def _near_the_peak(finding: Finding, facts: Any) -> Words:
    sentence = f"Computation: the device works at {finding.share:.0%} of its peak."
    return sentence, _steps(facts), NO_KERNELS


def _unpriced(finding: Finding, facts: Any) -> Words:
    peak = facts["peak_share"]
    reached = "" if peak is None else f"; {peak:.1%} of the device's peak"
    traced = "; a trace tells" if facts["device"] == "cuda" else ""
    if "why" in facts:
        why = facts["why"]
    else:
        why = (
            f"by {facts['rates']} its work takes {format_seconds(facts['work_s'])}, and the step "
            f"took {format_seconds(facts['median_s'])}: the rates are of another device, or were "
            f"measured while this one was busy; `{PROBE}` on a quiet machine measures them again"
        )
    missing = f"how busy the {_name(facts)} is ({why}{traced})"
    return "What binds the steps is not known yet.", f"{_steps(facts)}{reached}", missing


def _host_operations(finding: Finding, facts: Any) -> Words:
    return (
        "Where a CPU's time went is told by operation, and not judged.",
        HOST_SHARES.format(_families(facts)),
        "what stands between operations, and how efficient they are",
    )


def _host_split(finding: Finding, facts: Any) -> Words:
    missing = "efficiency of operations: of a CPU there are names and times"
    return "", HOST_SHARES.format(_families(facts)), missing


def _families(facts: Any) -> str:
    return ", ".join(f"{name} {share:.0%}" for name, share in facts["families"].items())


def _no_trace(finding: Finding, facts: Any) -> Words:
    return "Traces were asked for and none was recorded.", facts["why"], "kernels"


def _unreadable_trace(finding: Finding, facts: Any) -> Words:
    return "The newest trace of the run cannot be read.", facts["why"], "kernels"


def _no_hook(finding: Finding, facts: Any) -> Words:
    evidence = f"{facts['steps']} steps were watched"
    return "What no hook told is not judged.", evidence, "; ".join(facts["missing"])


def _not_in_log(finding: Finding, facts: Any) -> Words:
    evidence = f"{facts['steps']} steps were logged"
    return "What the log does not say is not judged.", evidence, "; ".join(facts["missing"])


OF_RUNS: Mapping[Kind, Describe] = {
    Kind.PHASE: _phase,
    Kind.PEAK_MEMORY: _peak_memory,
    Kind.TOKENS_WITHOUT_TARGET: _tokens_without_target,
    Kind.TOO_FEW_STEPS: _too_few_steps,
    Kind.OUT_OF_MEMORY: _out_of_memory,
    Kind.ENDED_NOT_FINITE: _ended_not_finite,
    Kind.DIVERGED: _diverged,
    Kind.UNTRAINED: _untrained,
    Kind.INACTIVE: _inactive,
    Kind.UNREACHED: _unreached,
    Kind.ABOVE_THE_START: _above_the_start,
    Kind.FORGOT: _forgot,
    Kind.OVERFITS: _overfits,
    Kind.WIDE_BASE: _wide_base,
    Kind.OTHER_TEMPLATE: _other_template,
    Kind.RELAPSED: _relapsed,
    Kind.RISING: _rising,
    Kind.SPIKES: _spikes,
    Kind.LOST_STEPS: _lost_steps,
    Kind.SLOWER_RECIPE: _slower_recipe,
    Kind.INPUT_WAIT: _input_wait,
    Kind.EXPOSED_COMMUNICATION: _communication,
    Kind.RECOMPILES: _recompiles,
    Kind.TINY_OPERATIONS: _tiny_operations,
    Kind.GRAPH_BREAKS: _graph_breaks,
    Kind.WIDE_MATMULS: _wide_matmuls,
    Kind.WASTED_TOKENS: _wasted_tokens,
    Kind.NEEDLESS_SAVINGS: _needless_savings,
    Kind.MEMORY_IN_PIECES: _in_pieces,
    Kind.MEMORY_FULL: _memory_full,
    Kind.CLOCK_LIMITED: _clock_limited,
    Kind.GPU_IDLES: _gpu_idles,
    Kind.HOST_NEVER_AHEAD: _host_never_ahead,
    Kind.OPERATION_OVERHEAD: _operation_overhead,
    Kind.MOVES_BYTES: _moves_bytes,
    Kind.SMALL_MATMULS: _small_matmuls,
    Kind.SLOW_KERNELS: _slow_kernels,
    Kind.COMPUTES: _computes,
    Kind.NEAR_THE_PEAK: _near_the_peak,
    Kind.UNPRICED: _unpriced,
    Kind.HOST_OPERATIONS: _host_operations,
    Kind.HOST_SPLIT: _host_split,
    Kind.NO_TRACE: _no_trace,
    Kind.UNREADABLE_TRACE: _unreadable_trace,
    Kind.NO_HOOK: _no_hook,
    Kind.NOT_IN_LOG: _not_in_log,
}

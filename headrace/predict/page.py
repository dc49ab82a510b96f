"""Format a prediction, or what a budget buys, for a reader, as `headrace plan` prints it."""

import math

from headrace.core.units import format_bytes, format_count, format_seconds
from headrace.costs.ledger import WORDS
from headrace.plan.plan import Plan
from headrace.predict.budget import Bought
from headrace.predict.intervals import STEP, Widening
from headrace.predict.prediction import MemoryPrediction, Prediction
from headrace.predict.scaling import CHINCHILLA, compute_optimal, is_fitted, is_swept

FITS = {"yes": "it fits", "tight": "it fits tightly", "no": "it does not fit"}
SOURCES = {
    "datasheet": "rates assumed from its datasheet; `headrace probe` measures them",
    "probes": "rates measured by probes",
}


def format_prediction(plan: Plan, prediction: Prediction) -> str:
    """Return the prediction of a plan as text for a reader."""
    rates = SOURCES[prediction.rates.source]
    if prediction.rates.calibrated_by:
        rates += f"; set by measured steps of {prediction.rates.calibrated_by}"
    source = f" ({rates})" if prediction.time.step_s else ""
    head = f"{plan.name} on {prediction.rates.device}{source}"
    lines = [head, "", *_format_memory(prediction.memory)]
    lines += filter(None, (prediction.rates.between_ranks, plan.mesh.left_open))
    return "\n".join([*lines, *_format_time(prediction), *_format_end(plan, prediction)])


def format_bought(bought: Bought) -> str:
    """Return what a budget buys as text for a reader."""
    plan, loss, ends = bought.plan, bought.loss, bought.loss.between
    model, rate = plan.model, plan.optimizer.lr
    whose = "the plan's own; its batch or Step Law's" if bought.keeps_rates else "Step Law, AdamW"
    tables = f" (beside {format_count(bought.tables)} in further tables)" if bought.tables else ""
    lines = [
        f"{bought.budget} buy {format_count(bought.parameters)} parameters{tables} and "
        f"{format_count(bought.tokens)} tokens, {bought.tokens_per_parameter:.3g} a parameter "
        f"(Chinchilla: {CHINCHILLA:g}), {bought.flops:.3g} FLOPs",
        f"shape: {model.layers} layers of {model.dim}, {model.heads} heads of "
        f"{model.resolved_head_dim}, ffn {model.resolved_ffn}, "
        f"vocabulary {model.vocab or plan.data.vocab}, sequences of {plan.data.sequence_length}",
        f"batch: {format_count(plan.batch.tokens)} tokens in {plan.rows_per_step} sequences, "
        f"{bought.steps} steps, learning rate {rate:g} after {plan.schedule.warmup_steps} steps of "
        f"warmup ({whose})",
        _format_data(bought),
        f"expected loss: {loss.nats:.3f} nats a token ({ends.low:.2f} to {ends.high:.2f}): the "
        "law's, for its corpus and tokenizer, not for yours; it ranks shapes",
        f"  {loss.by_parameters:.2f} of it a larger model could take away, "
        f"{loss.by_tokens:.2f} more tokens",
    ]
    guess = math.log(model.vocab or plan.data.vocab)
    if loss.nats > guess:
        lines.append(
            f"  a guess at random has {guess:.2f}: the law does not reach so small a model"
        )
    if not is_fitted(bought.parameters, bought.tokens):
        lines.append(
            "  extrapolated: the law was fitted to 57M to 16B parameters, from 245M tokens"
        )
    if not is_swept(bought.in_blocks, bought.tokens):
        lines.append(
            "  Step Law is extrapolated: it was swept over 60M to 1.1B parameters in "
            "blocks, from 2B tokens; `headrace lr-find` measures the rate here"
        )
    if bought.too_large is not None:
        parameters, tokens = compute_optimal(bought.flops)
        lines.append(
            f"memory holds it down: {format_count(bought.too_large)} parameters would have a lower "
            f"loss and do not fit; the law alone takes {format_count(parameters)} and "
            f"{format_count(tokens)} tokens"
        )
    return "\n".join([*lines, "", format_prediction(plan, bought.prediction)])


def _format_data(bought: Bought) -> str:
    """Return the line about how often the tokens repeat, and what they are worth."""
    if bought.fresh_tokens is None:
        return "data: every token is taken to be fresh; --data TOKENS says how many there are"
    epochs = bought.tokens / bought.fresh_tokens
    line = f"data: {epochs:.3g} epochs of {format_count(bought.fresh_tokens)} tokens"
    if epochs > 1:
        worth = bought.loss.effective_tokens
        line += f", worth {format_count(worth)} fresh ones (arXiv 2305.16264)"
    if bought.text_ends and round(bought.spent, 2) < 1:
        line += (
            f"\n  it takes {bought.spent:.2g} of the budget: with more passes a model of this size "
            "would learn the text by heart, and its loss on any other rise. More text is what "
            "lowers it"
        )
        if leave := _further_tables(bought.plan):
            line += f"\n  further tables are learned by heart first: {leave} buys a larger model"
    return line


def _further_tables(plan: Plan) -> str:
    """Return the words that leave a plan's further tables out; "" where it has none."""
    return " ".join(f"--without {name}" for name in plan.table_techniques)


def _format_memory(memory: MemoryPrediction) -> list[str]:
    """Return the lines about memory."""
    owners = ", ".join(f"{n} {format_bytes(b)}" for n, b in list(memory.owners.items())[:4])
    instants = ", ".join(
        f"{format_bytes(memory.instants[name])} {words}"
        for name, words in WORDS.items()
        if name in memory.instants
    )
    size = f"{format_bytes(memory.peak_bytes)} of {format_bytes(memory.capacity_bytes)}"
    if memory.context_bytes:
        size += f", beside the CUDA context's {format_bytes(memory.context_bytes)}"
    size += f", {WORDS[memory.peak_at]}"
    if memory.reserved_bytes is not None:
        size += f"; torch's allocator would reserve {format_bytes(memory.reserved_bytes)}"
    stages = memory.stages_bytes
    each = f"  of each stage: {', '.join(map(format_bytes, stages))}"
    return [
        f"memory: {FITS[memory.fits]}: {size}",
        f"  most of it: {owners}",
        f"  through a step: {instants}",
        *([each] if len(stages) > 1 else []),
    ]


def _format_time(prediction: Prediction) -> list[str]:
    """Return the lines about the time of a step."""
    time, basis = prediction.time, STEP.get(prediction.rates.basis)
    if time.step_s is None:
        return [f"time: not predicted: {time.unknown}"]
    parts = ", ".join(f"{name} {share:.0%}" for name, share in time.shares().items())
    step, rate = format_seconds(time.step_s), format_count(time.tokens_per_s or 0)
    begin = "time, if it fitted:" if prediction.memory.fits == "no" else "time:"
    ends, rates = time.step_between, time.rate_between
    if ends is None or rates is None or basis is None:
        lines = [f"{begin} {step} a step, {rate} tokens/s", f"  no interval: {time.no_interval}"]
    else:
        wider = _wider(prediction.rates.widening)
        lines = [
            f"{begin} {step} a step ({format_seconds(ends.low)} to {format_seconds(ends.high)}), "
            f"{rate} tokens/s ({format_count(rates.low)} to {format_count(rates.high)})",
            f"  in brackets: where 80% of {basis.n} {basis.says}{wider}",
        ]
    return [*lines, f"  where it goes: {parts}"]


def _wider(widening: Widening) -> str:
    """Return words for how much wider an interval is, and why; "" where it is not."""
    if widening.times == 1:
        return ""
    return f", each end {widening.times:g} times as far: {widening.why}"


def _format_end(plan: Plan, prediction: Prediction) -> list[str]:
    """Return the line about when the run ends, what fits until then, and what it costs."""
    run = prediction.run
    until = f"until {run.until}{', if it fitted' if prediction.memory.fits == 'no' else ''}"
    failures = [] if run.failures is None else run.failures.lines()
    if run.hours is None:
        return [until, *failures] if run.until else []
    last, facts = run.until.rpartition("; at the latest ")[2], list[str]()
    ends, price = run.hours_between, run.dollars_between
    wide = ends is not None and ends.low < ends.high
    if wide or not last.endswith(" minutes"):
        hours = format_seconds(3600 * run.hours)
        if ends is not None and wide:
            hours += f" ({format_seconds(3600 * ends.low)} to {format_seconds(3600 * ends.high)})"
        facts.append(hours)
    if run.steps is not None and not last.startswith("step "):
        tokens = format_count(plan.batches.before(run.steps))
        facts.append(f"room for {format_count(run.steps)} steps, {tokens} tokens")
    if run.dollars is not None:
        dollars = f"${run.dollars:,.2f}"
        if price is not None and price.low < price.high:
            dollars += f" (${price.low:,.2f} to ${price.high:,.2f})"
        facts.append(dollars)
    return [f"{until}{': ' if facts else ''}{', '.join(facts)}", *failures]

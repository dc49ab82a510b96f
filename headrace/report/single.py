"""Write the page about one run, from the verdict down to the plan, in the order a reader asks."""

import json
from collections.abc import Sequence
from pathlib import Path

from headrace.core.units import part_of_text
from headrace.data.mix_count import REPEATED_OFTEN
from headrace.doctor.words.answer import NOTHING_GAINS
from headrace.plan.symptoms import BOTTLENECKS
from headrace.report.advice import remedies
from headrace.report.family import family_section
from headrace.report.loss import loss_section
from headrace.report.page import (
    Safe,
    cards,
    facts,
    muted,
    page,
    section,
    table,
    tag,
    write_page,
)
from headrace.report.parts import memory, step_time, techniques
from headrace.report.run_files import (
    BottleneckRecord,
    MixRecord,
    Report,
    RunFiles,
    SpikeRecord,
    read_run,
)
from headrace.report.words import (
    NOT_MEASURED,
    bits,
    count,
    dollars,
    flops,
    percent,
    seconds,
    size,
    verdict,
    whole,
)

EDITED = "plan.toml was edited since; this is the plan that ran, as the run kept it."
"""Words for a plan that differs from what stands in its file by now."""


def write_report(run_directory: Path, output: Path | None = None) -> Path:
    """Write the page of a run from the files that lie there.

    Args:
        run_directory: a folder that holds `report.json`; `metrics.jsonl`, `environment.json` and
            `plan.toml` are read when they are there.
        output: where the page goes; `report.html` in the run's folder without it.

    Returns:
        The page's path.

    Raises:
        ConfigError: the folder is not a run, or one of its files cannot be read.
        ConfigError, RunError: the page cannot be written.
    """
    run = read_run(Path(run_directory))
    text = page(f"{run.report.name} - Headrace report", *report_sections(run))
    return write_page(output or run.directory / "report.html", text)


def report_sections(
    run: RunFiles,
    *,
    compared: Sequence[Safe] = (),
    within: Path | None = None,
    commands: bool = False,
) -> list[Safe]:
    """Return the sections of a run's page.

    Args:
        run: its files.
        compared: sections that follow the bottleneck and its remedies.
        within: relatives of the run are shown where they lie in this folder; None shows all.
        commands: add for each remedy the command that applies it.

    Raises:
        ConfigError: findings.json is damaged.
    """
    report = run.report
    return [
        _header(report),
        *_doubts(report),
        *_spikes(report),
        section("Key figures", cards(_figures(report))),
        bottleneck_section(report.bottleneck, commands=commands),
        remedies(run.directory, commands=commands),
        *compared,
        loss_section([run], [report.name]),
        *family_section(run.directory, within),
        step_time(run),
        memory(report),
        _wasted(report),
        techniques(report),
        *_validation_pairs(report),
        *_texts(report),
        *_left_out(report),
        *_cleaned(report),
        _sample(report),
        _environment(run),
        _repeat(run),
    ]


def _header(report: Report) -> Safe:
    """Render the run's name and what became of it."""
    ruling = verdict(report)
    return tag(
        "header",
        tag("p", "Headrace run report", class_="eyebrow"),
        tag("h1", report.name),
        tag("span", ruling.badge, class_=f"badge {ruling.tone}"),
        tag("p", ruling.sentence, class_="verdict"),
        *(muted(f"It begins at step {whole(p.step)} of {p.run}.") for p in [report.parent] if p),
        *(muted(f"Note: {one.reason}; try: {one.remedy}") for one in report.doubts),
    )


def _figures(report: Report) -> list[tuple[str, str, str]]:
    """Return the key figures as (name, value, note)."""
    last = report.evaluated[-1] if report.evaluated else None
    used, peak = report.model_flops_utilization, report.peak_memory_bytes
    of_peak = f"of {flops(used.peak_flops)}/s" if used.peak_flops else "device peak unknown"
    method = f", by {peak.method}" if peak.method else ""
    figures = [
        (
            "Validation, bits per byte",
            bits(last and last.bits_per_byte),
            f"{bits(last.loss_nats)} nats per token; best {bits(report.best_bits_per_byte)}"
            + _part(last.share)
            if last
            else "",
        ),
        ("Wall time", seconds(report.wall_s), f"{whole(report.steps)} steps"),
        ("Training tokens", count(report.tokens), f"{count(report.parameters)} parameters"),
        ("Steady speed", whole(report.steady_tokens_per_s), "tokens per second, median"),
        ("Model FLOPs utilization", percent(used.value), of_peak),
        ("Peak memory", size(peak.allocated), f"{size(peak.predicted)} predicted{method}"),
        ("Wasted tokens", percent(report.wasted_token_fraction), "of all that were computed"),
        ("Skipped steps", whole(report.skipped_steps), "whose updates were masked"),
    ]
    if report.restarts or report.resumes:
        figures.append(("Goodput", percent(report.uptime.goodput), _restarts(report)))
    if report.general is not None:
        after, before = report.general.after_nats, report.general.before_nats
        figures.insert(1, ("General text, nats per token", bits(after), f"{bits(before)} before"))
    if report.dollars is not None:
        figures.insert(2, ("Cost", dollars(report.dollars), "wall time at the plan's price"))
    return figures


def _restarts(report: Report) -> str:
    """Return how often a run was started anew, and what that took."""
    lost, uptime = whole(report.uptime.lost_steps), report.uptime
    return (
        f"{whole(report.restarts)} restarts after failures, {whole(report.resumes)} resumes; "
        f"{lost} steps lost ({seconds(uptime.lost_s)}), {seconds(uptime.down_s)} down, "
        f"{seconds(uptime.start_s)} starting"
    )


def _validation_pairs(report: Report) -> list[Safe]:
    """Render how held-out preference pairs were ranked, before the first step and after each part.

    Rewards compare with the model before training, which is apart from itself in no pair.
    """
    rated = [(whole(row.step), row) for row in report.evaluated if row.pairs]
    if not rated:
        return []
    first = [("before", report.before)] if report.before is not None else []
    columns = ("step", "chosen is likelier", "ranked right", "rewards apart", "loss of a pair")
    rows = [
        (
            name,
            percent(row.chosen_likelier),
            percent(row.ranked_right),
            bits(row.reward_margin),
            bits(row.pair_loss),
        )
        for name, row in (*first, *rated)
    ]
    pairs = whole(rated[-1][1].pairs)
    return [section("Held-out pairs", table(f"{pairs} pairs, none trained on", columns, rows))]


def _part(share: float | None) -> str:
    """Render how much of the validation text was read; "" where that was not noted."""
    return f"; {part_of_text(share)}" if share is not None else ""


def _spikes(report: Report) -> list[Safe]:
    """Render each spike in the loss or the gradient norm, and what was done about it."""
    if not report.spikes:
        return []
    return [section("Spikes", *(tag("p", _spike(spike)) for spike in report.spikes))]


def _spike(spike: SpikeRecord) -> str:
    """Render one spike as a sentence or two."""
    states = " and ".join(whole(step) for step in spike.rewound_to)
    back = f", the weights went back to those after step {states}" if states else ""
    words = (
        f"Step {whole(spike.step)}: loss {_or_wild(spike.loss)} (limit {_or_wild(spike.loss_limit)}"
        f"), gradient norm {_or_wild(spike.grad_norm)} (limit {_or_wild(spike.norm_limit)}). "
        f"{whole(spike.masked)} updates were masked{back}; "
    )
    since = spike.recovered
    words += (
        "it did not recover." if since is None else f"in its band again from {whole(since)} on."
    )
    return words + f" {spike.source[:1].upper()}{spike.source[1:]}." * bool(spike.source)


def _or_wild(value: float | None) -> str:
    """Render a number of a spike; None stands for one that was not finite."""
    return "not finite" if value is None else f"{value:.3g}"


def _doubts(report: Report) -> list[Safe]:
    """Render what makes the validation loss doubtful, and what mends it."""
    if report.data is None or not report.data.doubts:
        return []
    lines = [
        item
        for doubt in report.data.doubts
        for item in (
            tag("p", doubt.reason[:1].upper() + doubt.reason[1:] + ".", class_="lead"),
            muted("Try: ", doubt.remedy),
        )
    ]
    return [tag("section", tag("h2", "Doubts about the validation"), *lines, class_="narrow")]


def _texts(report: Report) -> list[Safe]:
    """Render what was trained on and what was held out."""
    data = report.data
    if data is None:
        return []
    rows = [
        ("Training", size(data.train_bytes), whole(data.train_documents)),
        ("Validation", size(data.held_out_bytes), whole(data.held_out_documents)),
    ]
    notes = []
    if data.held_out_share is not None:
        notes.append(f"{percent(data.held_out_share)} of the text is held out.")
    if data.cut_documents:
        notes.append(f"{whole(data.cut_documents)} held-out documents are ends of larger ones.")
    if data.targets is not None:
        notes.append(f"Each evaluation counts {whole(data.targets)} targets.")
    return [
        section(
            "Training and validation text",
            table("Texts", ("Side", "Text", "Documents"), rows),
            muted(" ".join(notes)),
            *_mixture(data.mixture),
        )
    ]


def _mixture(mix: MixRecord | None) -> list[Safe]:
    """Render how much of each source was read, by stage where there are several."""
    if mix is None or not mix.sources:
        return []
    staged = len(mix.stages) > len(mix.sources)
    rows = [
        (
            one.source,
            "all" if one.stage is None else whole(one.stage),
            count(one.tokens),
            percent(one.share),
            NOT_MEASURED if one.epochs is None else f"{one.epochs:.2f}",
        )
        for one in (*mix.sources, *(mix.stages if staged else ()))
    ]
    often = " and ".join(mix.repeated_often)
    says = (
        f"{often}: read more often than {REPEATED_OFTEN} times, beyond which repeated tokens lose "
        "their worth (arXiv 2305.16264)."
    )
    head = ("Source", "Stage", "Tokens read", "Share", "Epochs")
    return [table("Mixture", head, rows), *([muted(says)] if often else [])]


def bottleneck_section(bottleneck: BottleneckRecord | None, *, commands: bool) -> Safe:
    """Render the doctor's verdict: what binds the run's steps, and the remedy to try first."""
    if bottleneck is None:
        body = (muted(f"The bottleneck was {NOT_MEASURED}."),)
    else:
        share = f"{percent(bottleneck.share)} of the step." if bottleneck.share is not None else ""
        evidence = " ".join(part for part in (share, bottleneck.evidence) if part)
        body = (
            tag(
                "p",
                bottleneck.sentence[:1].upper() + bottleneck.sentence[1:],
                class_="lead",
            ),
            muted("Evidence: ", evidence or NOT_MEASURED),
            *((muted(bottleneck.unknown),) if bottleneck.unknown else ()),
            *((muted("Healthy: ", NOTHING_GAINS, "."),) if bottleneck.healthy else ()),
            *(
                _first_remedy(bottleneck.remedy, bottleneck.gain or "", commands=commands)
                if bottleneck.remedy
                else ()
            ),
        )
    known = bottleneck is not None and bottleneck.name in BOTTLENECKS
    title = f"Bottleneck: {bottleneck.name}" if bottleneck and known else "Bottleneck"
    return tag("section", tag("h2", title), *body, class_="narrow")


def _first_remedy(remedy: str, gain: str, *, commands: bool) -> list[Safe]:
    """Render the remedy to try first: in a line, or as a command in a box of its own."""
    if commands:
        box = tag("pre", remedy, class_="command", tabindex="0")
        return [tag("p", f"Try first, for {gain}:"), box]
    return [tag("p", "Try first: ", tag("code", remedy), f": {gain}")]


def _wasted(report: Report) -> Safe:
    """Render the share of tokens that were computed and taught nothing."""
    share = report.wasted_token_fraction
    if share is None:
        return section("Wasted tokens", muted(f"Wasted tokens were {NOT_MEASURED}."))
    lost = f", about {count(share * report.tokens)} tokens" if report.tokens is not None else ""
    return section(
        "Wasted tokens",
        tag("p", tag("strong", percent(share)), f" of the tokens that were computed{lost}."),
        muted("Padding and positions without a target: paid for like the rest, not learned from."),
    )


def _cleaned(report: Report) -> list[Safe]:
    """Render what fell of the text before it was trained on; nothing where nothing was asked."""
    if not report.cleaning:
        return []
    rows = [
        (
            name,
            f"{whole(one.dropped_documents)} of {whole(one.documents)}",
            whole(one.cut_documents),
            f"{size(one.dropped_bytes)} of {size(one.bytes)}",
        )
        for name, one in report.cleaning.items()
    ]
    pairs = [pair for one in report.cleaning.values() for pair in one.examples]
    heads = ("Step", "Documents dropped", "Documents cut", "Text")
    body = [table("Cleaned text", heads, rows)]
    if pairs:
        body.append(table("Examples", ("What fell", "What it fell for"), pairs, text=2))
    return [section("Cleaned text", *body)]


def _left_out(report: Report) -> list[Safe]:
    """Render what of the sources is no text to train on; nothing where all of it is."""
    if not report.left_out:
        return []
    rows = [
        (
            one.words,
            ", ".join(one.examples) + ", ..." * (one.count > len(one.examples)),
            whole(one.count),
        )
        for one in report.left_out
    ]
    return [
        section("Left out of the data", table("Left out", ("What", "Names", "Count"), rows, text=2))
    ]


def _sample(report: Report) -> Safe:
    """Render text that the model wrote."""
    if report.sample is None:
        return section("A sample of its text", muted("No sample was written."))
    prompt = tag("b", report.sample.prompt)
    return section(
        "A sample of its text",
        tag("pre", prompt, report.sample.text, class_="sample", tabindex="0"),
        muted("The prompt is in bold."),
    )


def _environment(run: RunFiles) -> Safe:
    """Render where it ran, and what identifies its data."""
    report = run.report
    pairs = [(key.replace("_", " "), plain(value)) for key, value in run.environment.items()]
    pairs += [("seed", plain(report.seed)), ("token stream sha256", plain(report.stream_sha256))]
    pairs += [(f"tokenizer {k}", plain(v)) for k, v in (report.tokenizer or {}).items()]
    used = report.model_flops_utilization
    pairs.append(("model work per token", flops(used.model_flops_per_token)))
    pairs.append(("utilization formula", plain(used.formula)))
    pairs.append(
        (
            "peak of the device",
            f"{flops(used.peak_flops)}/s; {plain(used.peak_source)}"
            if used.peak_flops
            else "unknown",
        )
    )
    return section("Environment", facts("Environment", pairs))


def plain(value: object) -> str:
    """Render a JSON value as text."""
    if value is None:
        return "unknown"
    if isinstance(value, str):
        return value
    return json.dumps(value, ensure_ascii=False).strip('"')


def _repeat(run: RunFiles) -> Safe:
    """Render the command that repeats the run, and the plan it reads."""
    command = run.report.command
    plan = (
        tag(
            "details",
            tag("summary", "The resolved plan, plan.toml"),
            muted(EDITED) if run.edited else Safe(""),
            tag("pre", run.plan_toml, tabindex="0"),
        )
        if run.plan_toml
        else muted("The folder holds no plan.toml.")
    )
    line = tag("pre", command, class_="command") if command else muted("No command was recorded.")
    return section("Repeat this run", line, plan)

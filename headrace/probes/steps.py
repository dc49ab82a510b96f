"""Time whole steps of small decoders on a CPU, as a plain trainer takes them.

What a step takes beyond its pieces (memory that the system allocates anew, caches that other
operations have filled) corrects their sum. Some steps are compiled, keep their memory, use other
counts of threads or multiply bf16.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

import torch
from torch import nn

from headrace.core import cores, kept_memory
from headrace.costs.rates import Half, MeasuredStep
from headrace.model.decoder import Decoder
from headrace.model.head import cross_entropy
from headrace.model.mask import Rows
from headrace.optim.adamw import clip_factor, gradient_norm, make_adamw, scale_gradients
from headrace.plan.plan import OptimizerConfig
from headrace.probes.points import Probe, Readings
from headrace.probes.small_decoders import Small, decoder, random_ids

COMPILE_S = 6.0
"""About the seconds that compiling a small decoder takes. Two slow cores without a cache of headers
take longer, and the probe then ends after its budget."""


def thread_counts() -> list[int]:
    """Return counts of threads to time: powers of two up to all cores, but not torch's own."""
    most = len(cores.cores())
    counts = {2**n for n in range(most.bit_length())} | {most}
    return sorted(counts - {torch.get_num_threads()}, reverse=True)


def step_probe(
    readings: Readings,
    small: Small,
    *,
    compiled: bool = False,
    keeps: bool = False,
    threads: int = 0,
    half: Half = "",
) -> Probe:
    """Return the probe of a plain trainer's step: forward, backward, clipping and update.

    Args:
        readings: receives the measured step.
        small: the decoder.
        compiled: torch compiles its blocks and its loss.
        keeps: the process keeps the memory that the step frees.
        threads: how many threads torch uses; 0 is as many as it uses now.
        half: how it computes in bf16, by autocast or with parameters in bf16; "" is fp32.
    """
    before = torch.get_num_threads()

    def run() -> None:
        with ExitStack() as stack:
            stack.callback(torch.set_num_threads, before)
            torch.set_num_threads(threads or before)
            if keeps:
                stack.enter_context(kept_memory.kept())
            if compiled:
                stack.enter_context(_compiling())
            seconds = readings.clock.seconds(_plain_step(readings, small, compiled, half))
        own = {"compiled": compiled, "keeps": keeps, "threads": threads or before, "half": half}
        readings.steps.append(MeasuredStep(**asdict(small), **own, seconds=seconds))

    work = 6.0 * small.tokens * (12 * small.layers * small.dim + small.vocab) * small.dim
    group = "compiled steps" if compiled else "steps at other counts" if threads else "steps"
    label = f"{small.layers} layers of {small.dim}, {small.rows} rows of {small.length}"
    label += ", memory kept" if keeps else f", {threads} threads" if threads else ""
    label += f", bf16 by {half}" if half else ""
    needed = 16.0 * small.tokens * (16 * small.layers * small.dim + small.vocab)
    return Probe(group, label, work, needed, run, COMPILE_S if compiled else 0.0)


@contextmanager
def _compiling() -> Iterator[None]:
    """Compile in this process only, since other processes would take the cores that are timed."""
    from torch._inductor import config

    try:
        with config.patch(compile_threads=1):
            yield
    finally:
        torch.compiler.reset()


def _plain_step(
    readings: Readings, small: Small, compiled: bool, half: Half = ""
) -> Callable[[], None]:
    model = decoder(readings, small)
    masters = _stored_in_bf16(model) if half == "parameters" else {}
    model.residual_dtype = torch.bfloat16 if half else torch.float32
    update = make_adamw(OptimizerConfig(lr=1e-5), dict(model.named_parameters()) | masters).step
    ids, targets = (random_ids(readings, small, small.rows, small.length) for _ in range(2))
    rows, scale = Rows(torch.arange(small.length)[None]), torch.tensor(1.0 / small.tokens)
    if compiled:
        model.states = torch.compile(model.states, fullgraph=True, dynamic=False)  # type: ignore[method-assign]
        model.loss = torch.compile(model.loss, fullgraph=True, dynamic=False)  # type: ignore[method-assign]

    weights = dict(model.named_parameters())

    def step() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast("cpu", torch.bfloat16, enabled=bool(half)):
            loss = model(ids, targets, rows, objective=cross_entropy, scale=scale)
        loss.backward()
        gradients = [p.grad for p in model.parameters() if p.grad is not None]
        scale_gradients(gradients, clip_factor(gradient_norm(gradients), 1.0))
        for name, master in masters.items():
            master.grad = weights[name].grad.float()  # type: ignore[union-attr]
        update()
        for name, master in masters.items():
            weights[name].data.copy_(master.data)

    return step


def _stored_in_bf16(model: Decoder) -> dict[str, nn.Parameter]:
    """Store a decoder's matrices, except its embedding, in bf16; return the fp32 ones by name."""
    masters = {}
    for name, parameter in model.named_parameters():
        if parameter.ndim == 2 and name != "embed.weight":
            masters[name] = nn.Parameter(parameter.data)
            parameter.data = parameter.data.bfloat16()
    return masters

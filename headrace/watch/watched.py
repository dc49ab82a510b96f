"""Watch a loop: put hooks on, take them off, and note what each of them sees.

A step is `input` (the wait for a batch), `transfer` (until the forward), `forward`, `backward`
(until `optimizer.step`), for each micro-batch, then `optimizer`, then `other` until the next batch;
a forward without gradients between two steps begins an `eval`. A Trainer's callback also says what
was an evaluation from its beginning, and what a `checkpoint`.
"""

import json
import os
import threading
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from headrace.core.errors import ConfigError, MemoryFull, is_out_of_memory
from headrace.core.files import write_whole
from headrace.observe.gauges import Gauges
from headrace.observe.profiler import ProfilerWindows
from headrace.observe.signals import OUTSIDE
from headrace.watch.batches import loss_in, token_counts, watch_loader
from headrace.watch.clock import NUMBERS, Hook, HookClock, autocast_of, with_hooks
from headrace.watch.norms import gradient_norm
from headrace.watch.report import WARMUP_STEPS, Compiled, Idle, StepTally, allocator, describe
from headrace.watch.trainer import trainer_callback


class Watched:
    """Watch a training loop, and hold what was read of it so far. `headrace.watch` makes one."""

    def __init__(self, trace: str | Path | None = None) -> None:
        self.loader: Any = None
        self._folder = None if trace is None else Path(trace)
        self.status, self.message, self.error = "running", "", ""
        self.tally = StepTally()
        self._clock = HookClock(torch.device("cpu"))
        self._look(self._clock.device)
        self._undo: list[Callable[[], Any]] = []
        self._facts: dict[str, Any] = {}
        self._wall_s = 0.0
        self._steps = self._tokens = 0
        self._noted_loss = self._noted_norm = False

    # --- on and off ---

    def attach(
        self, model: nn.Module, optimizer: Any, loader: Any = None, *, arguments: Any = None
    ) -> "Watched":
        """Watch these from now on; what was watched before is let go and forgotten.

        Args:
            model: the model, as `headrace.watch` takes it.
            optimizer: its optimizer.
            loader: what batches come from.
            arguments: the arguments of a Trainer, if one trains.

        Raises:
            ConfigError: the optimizer is none of torch's.
        """
        self.close()
        optimizer = with_hooks(optimizer)
        parameter = next(model.parameters(), None)
        device = torch.device("cpu") if parameter is None else parameter.device
        self._clock, self._optimizer = HookClock(device), optimizer
        self._numbers = torch.zeros(len(NUMBERS), device=device)
        self._slots: dict[str, Tensor] = dict(zip(NUMBERS, self._numbers.unbind(), strict=True))
        self._nothing = torch.zeros(len(NUMBERS))
        self._thread = threading.get_ident()
        self._facts = describe(model, optimizer, loader, arguments)
        self._before, self._idle = allocator(device), Idle(model, optimizer)
        self._look(device)
        self._opened_s: float | None = None
        self._phase, self.status, self.message, self.error = "other", "running", "", ""
        self.tally, self._wall_s, self._steps, self._tokens = StepTally(), 0.0, 0, 0
        self._compiled, self._noted_loss, self._noted_norm = Compiled.now(), False, False
        self._new_step()
        before = optimizer.register_step_pre_hook(Hook(self._optimizer_begins))
        behind = optimizer.register_step_post_hook(Hook(self._optimizer_ends))
        self._undo += [before.remove, behind.remove]
        self._undo += self._hook_model(model)
        if loader is not None:
            self.loader, undo = watch_loader(loader, self._timed)
            self._undo.append(undo)
        self._began_s = time.perf_counter()
        return self

    def close(self) -> None:
        """Take everything off again; what was read stays."""
        if not self._undo:
            return
        self._wall_s = self._passed_s()
        while self._undo:
            self._undo.pop()()
        self._profiler_windows.close()
        self._gauges.close()
        self._take_rows()
        if self.status == "running":
            self.status = "done"

    def __enter__(self) -> "Watched":
        return self

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        exits = isinstance(error, SystemExit) and error.code in (None, 0)
        if exits or isinstance(error, KeyboardInterrupt | GeneratorExit):
            self.status = "interrupted"
        elif error is not None:
            self.status, self.message = "failed", f"{type(error).__name__}: {error}"
            full = is_out_of_memory(error)
            self.error = MemoryFull.__name__ if full else type(error).__name__
        self.close()

    def _look(self, device: torch.device) -> None:
        """Look at the device beside the steps: by gauges, and a profiler window where asked."""
        group = torch.distributed
        rank = group.get_rank() if group.is_available() and group.is_initialized() else 0
        self._gauges = Gauges(device)
        self._profiler_windows = ProfilerWindows(
            self._folder or Path(),
            device,
            every_steps=None if self._folder else 0,
            rank=rank,
            warn=lambda message: warnings.warn(message, stacklevel=2),
        )

    def _hook_model(self, model: nn.Module) -> list[Callable[[], Any]]:
        inside = model._compiled_call_impl  # set by model.compile(), which traces hooks too
        if inside is None:
            pre = model.register_forward_pre_hook(Hook(self._forward_begins))
            post = model.register_forward_hook(Hook(self._forward_ends), with_kwargs=True)
            return [pre.remove, post.remove]

        def around(*args: Any, **named: Any) -> Any:
            if torch.compiler.is_compiling():
                return inside(*args, **named)
            self._forward_begins()
            output = inside(*args, **named)
            self._forward_ends(model, args, named, output)
            return output

        model._compiled_call_impl = around  # type: ignore[assignment]

        def undo() -> None:
            if model._compiled_call_impl is around:
                model._compiled_call_impl = inside

        return [undo]

    # --- what a loop says, and what it asks ---

    def note(
        self,
        *,
        loss: Any = None,
        grad_norm: Any = None,
        max_norm: float | None = None,
        tokens: int = 0,
        targets: Any = None,
        skipped: bool = False,
    ) -> None:
        """Tell what no hook sees, before `optimizer.step`. Tensors are read when they are complete.

        Args:
            loss: of a micro-batch, in nats per token; the step's is their mean. A loss that the
                model returns as `output.loss` is seen without this.
            grad_norm: before clipping, as `torch.nn.utils.clip_grad_norm_` returns it. Until one is
                noted each step's is read when `optimizer.step` begins, so behind clipping.
            max_norm: what it was clipped to.
            tokens: slots that were computed, where batches do not name their `input_ids`.
            targets: of them, what the loss counted.
            skipped: `optimizer.step` was left out, as a loss scaler does after an overflow.

        Raises:
            ConfigError: a distributed tensor, which only all ranks together can read.
        """
        if not self._undo:
            return
        given = {"loss": loss, "grad_norm": grad_norm, "targets": targets}
        if spread := [name for name, value in given.items() if hasattr(value, "full_tensor")]:
            message = f"headrace.watch was given a distributed tensor as {', '.join(spread)}"
            whole = ", ".join(f"{name}={name}.full_tensor()" for name in spread)
            raise ConfigError(message, f"watched.note({whole})")
        if loss is not None:
            if not self._noted_loss:
                self._forget("loss")  # what the model returned
            self._noted_loss = True
            self._losses = self._losses + 1 if "loss" in self._host else 1
            self._add("loss", loss)
        if grad_norm is not None:
            self._noted_norm = True  # one before clipping stands beside none behind it
            self._forget("grad_norm")
            self._add("grad_norm", grad_norm)
            self._max_norm = max_norm
        if targets is not None:
            self._add("targets", targets)
        self._step_tokens += tokens
        if skipped and self._phase not in OUTSIDE:
            self._add("skipped", 1.0)
            self._end_step()

    def between(self, phase: str, *, was: str = "") -> None:
        """Begin another phase of what a loop does between two steps; within a step do nothing.

        Args:
            phase: "other", "eval" or "checkpoint".
            was: the phase that has just ended, where only its end is known.
        """
        if self._phase not in OUTSIDE or not self._live():
            return
        if was:
            self._profiler_windows.drop()
            self._clock.rename_last(was)
        self._mark(phase)

    def callback(self) -> Any:
        """Return a TrainerCallback that watches what a Hugging Face Trainer trains.

        Raises:
            UnsupportedError: transformers is not installed.
        """
        return trainer_callback(self)

    def report(self) -> dict[str, Any]:
        """Return what is known by now, in the names of a run's report.json; wait for nothing."""
        self._take_rows()
        known = {
            "status": self.status,
            "message": self.message,
            "error": self.error,
            "steps": self._steps,
        }
        before = self._before if self._facts else None
        report = self.tally.report(
            {**known, "wall_s": self._passed_s(), **self._facts}, self._clock, before
        )
        if (traced := self._profiler_windows.report()) is not None:
            traced["folder"] = str(self._profiler_windows.folder)
        report["signals"] |= {"traces": traced, "gpu": self._gauges.report()}
        if self._facts:
            report["signals"] |= self._idle.report()
        return report

    def save(self, path: str | Path) -> None:
        """Write the report as JSON, aside and renamed; numbers that are not finite become null.

        Where traces lie is told from the file on, so both can be moved together.
        """
        path, report = Path(path), self.report()
        if (traced := report["signals"]["traces"]) is not None:
            traced["folder"] = os.path.relpath(traced["folder"], path.parent)
        plain = json.loads(json.dumps(report), parse_constant=lambda word: None)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(plain, indent=1, allow_nan=False))

    def _passed_s(self) -> float:
        return self._wall_s + (time.perf_counter() - self._began_s if self._undo else 0.0)

    # --- hooks ---

    def _live(self) -> bool:
        """Return whether what happens now is the training that is watched."""
        here = bool(self._undo) and threading.get_ident() == self._thread
        return here and not (self._clock.cuda and torch.cuda.is_current_stream_capturing())

    def _timed(self, call: Callable[..., Any], source: Any, *, opens: bool = False) -> Any:
        """Return `call(source)`, and note the wait for it."""
        if not self._live() or not torch.is_grad_enabled():
            return call(source)
        self._begin_step()
        self._lead("dry_before_input")
        self._mark("input")
        began_s = time.perf_counter()
        try:
            with self._profiler_windows.named("next_batch"):
                batch = call(source)
        except StopIteration:
            self._mark("other")
            if not self._forwards:
                self._leads.clear()
            raise
        finally:
            wait_s = time.perf_counter() - began_s
            self._wait_s += wait_s
        if opens:
            self._opened_s = wait_s
            return batch
        if self._opened_s is not None:
            self._epoch_wait_s, self._opened_s = self._opened_s + wait_s, None
        self._lead("dry_after_input")
        self._mark("transfer")
        counts = token_counts(batch)
        self._step_tokens += counts.pop("tokens", 0)
        for name, count in counts.items():
            self._add(name, count)
        return batch

    def _forward_begins(self, *_: Any) -> None:
        if not self._live():
            return
        if torch.is_grad_enabled():
            self._begin_step()
            self._lead("dry_at_forward")
            if "autocast" not in self._facts:
                self._facts["autocast"] = autocast_of(self._clock.device)
            self._forwards += 1
            self._mark("forward")
        elif self._phase == "other":
            self._mark("eval")

    def _forward_ends(self, module: Any, args: Any, named: dict[str, Any], output: Any) -> None:
        if self._phase != "forward" or not torch.is_grad_enabled() or not self._live():
            return
        self._mark("backward")
        loss = loss_in(output)
        plain = isinstance(loss, Tensor) and not hasattr(loss, "full_tensor")
        if plain and not self._noted_loss:
            # With `num_items_in_batch` a micro-batch's loss is its share of the step's.
            adds_up = named.get("num_items_in_batch") is not None
            self._losses = 1 if adds_up or "loss" not in self._host else self._losses + 1
            self._add("loss", loss)

    def _optimizer_begins(self, *_: Any) -> None:
        if not self._live():
            return
        self._begin_step()
        if not self._forwards:
            self._clock.rename("transfer", "forward")  # compiled by somebody else's wrapper
        self._mark("optimizer")
        self._idle.look(self._steps)
        overflow = getattr(self._optimizer, "found_inf", None)  # a loss scaler's, fused
        if isinstance(overflow, Tensor):
            self._add("skipped", overflow)
        if not self._noted_norm:
            norm = gradient_norm(self._optimizer, self._numbers.device)
            if norm is not None:
                self._add("grad_norm", norm)

    def _optimizer_ends(self, *_: Any) -> None:
        if self._live():
            self._end_step()

    # --- a step ---

    def _new_step(self) -> None:
        self._host: dict[str, float] = {}
        self._leads: dict[str, bool] = {}
        self._on_device = False
        self._wait_s = self._epoch_wait_s = 0.0
        self._step_tokens = self._forwards = self._losses = 0
        self._max_norm: float | None = None

    def _begin_step(self) -> None:
        if self._phase in OUTSIDE and not self._forwards and not self._leads:
            self._compiled = Compiled.now()  # what an evaluation compiled is no step's

    def _mark(self, phase: str) -> None:
        if phase == "eval":
            self._profiler_windows.drop()
        self._phase = phase
        self._clock.mark(phase)

    def _lead(self, where: str) -> None:
        """Ask the device, once a step and place, whether it has run dry."""
        if where not in self._leads:
            self._leads[where] = self._clock.dry()

    def _add(self, name: str, value: Any) -> None:
        """Add to a number of this step, where it is: a tensor on a device stays there."""
        known = self._host.setdefault(name, 0.0)
        if isinstance(value, Tensor):
            value = value.detach()
            value = value.float().mean() if value.numel() > 1 else value.reshape(())
            if value.device.type != "cpu":
                value = value.to(self._numbers.device, non_blocking=True)
                self._slots[name].add_(value)
                self._on_device = True
                return
        self._host[name] = known + float(value)

    def _forget(self, name: str) -> None:
        if self._host.pop(name, None) is not None and self._on_device:
            self._slots[name].zero_()

    def _end_step(self) -> None:
        self._steps += 1
        self._tokens += self._step_tokens
        lr = self._optimizer.param_groups[0].get("lr")
        facts: dict[str, Any] = {
            "tokens": self._tokens,
            "step_tokens": self._step_tokens,
            "wait_s": self._wait_s,
            "epoch_wait_s": self._epoch_wait_s,
            "forwards": self._forwards,
            "host": self._host,
            "losses": self._losses,
            **Compiled.now().since(self._compiled),
        }
        if isinstance(lr, float):
            facts["lr"] = lr
        if self._profiler_windows.traced:
            facts["traced"] = 1
        if self._max_norm is not None:
            facts["max_norm"] = self._max_norm
        if self._clock.asynchronous:
            facts |= self._leads
        numbers = self._numbers if self._on_device else self._nothing
        self._clock.end_step(self._steps, numbers, facts)
        if self._on_device:
            self._numbers.zero_()
        if self._steps == WARMUP_STEPS:
            self._gauges.start()
        self._profiler_windows.advance(self._steps, steady=not facts["compile_s"])
        self._profiler_windows.begin()
        self._new_step()
        self._mark("other")
        self._take_rows()

    def _take_rows(self) -> None:
        for row in self._clock.drain(keep=None):
            self.tally.add(row)

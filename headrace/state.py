"""What of a Build is kept in a checkpoint, by global names that no layout changes.

Tensors: `model/NAME`, `optimizer/ROUTE/NAME/KEY`, `technique/WHO/NAME`.
Values: counters, the stream's place and hash, each rank's RNG, fingerprints of data and tokenizer.
"""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from headrace.checkpoint import Saved
from headrace.core.errors import ConfigError
from headrace.core.plan import Plan
from headrace.sockets import Build

MUST_STAY = (
    "seed", "model", "batch.tokens",
    "data.sources", "data.weights", "data.validation", "data.text_key", "data.tokenizer",
    "data.vocab", "data.sequence_length",
)  # fmt: skip
"""Plan keys that a resume may not change: they would make it another run."""


def tensors(build: Build) -> dict[str, Tensor]:
    """Every tensor of the run's state on this rank, by global name."""
    found: dict[str, Tensor] = {f"model/{n}": p for n, p in build.model.named_parameters()}
    for route, optimizer in build.optimizers.items():
        for name, parameter in build.routed[route].items():
            for key, value in optimizer.state.get(parameter, {}).items():
                if isinstance(value, Tensor):
                    found[f"optimizer/{route}/{name}/{key}"] = value
    for who, keeper in build.state.items():
        found |= {f"technique/{who}/{n}": t for n, t in keeper.tensors().items()}
    return found


def values(build: Build, counters: dict[str, Any]) -> dict[str, Any]:
    """Every JSON value of the run's state."""
    return {
        "counters": counters,
        "plan": build.plan.dump(),
        "fingerprint": build.prepared.fingerprint,
        "techniques": {who: keeper.values() for who, keeper in build.state.items()},
        "rank": {"rng": _rng(build.device)},
    }


def restore(build: Build, saved: Saved) -> dict[str, Any]:
    """Fill the build from a checkpoint, whatever layout wrote it; returns its counters.

    Raises:
        ConfigError: the data, the tokenizer, the mixture or the plan is not the saved run's.
        RunError: the checkpoint is damaged.
    """
    check_same_run(saved.values, build.plan, build.prepared.fingerprint)
    for name, parameter in build.model.named_parameters():
        saved.fill_(f"model/{name}", parameter)
    for route, optimizer in build.optimizers.items():
        _restore_optimizer(route, optimizer, build.routed[route], saved)
    for who, keeper in build.state.items():
        for name, tensor in keeper.tensors().items():
            saved.fill_(f"technique/{who}/{name}", tensor)
        keeper.load_values(saved.values["techniques"][who])
    if build.world.rank < len(saved.parts):
        _set_rng(saved.parts[build.world.rank]["rank_values"]["rng"], build.device)
    return saved.values["counters"]


def check_same_run(
    saved: Mapping[str, Any], plan: Plan, fingerprint: Mapping[str, str]
) -> None:
    """Refuse to continue another run's checkpoint, naming what differs.

    Raises:
        ConfigError: with the key or the thing that changed.
    """
    before, now = saved["plan"], plan.dump()
    for key in MUST_STAY:
        old, new = _at(before, key), _at(now, key)
        if old != new:
            names = [k for k in old if old[k] != new.get(k)] if isinstance(old, dict) else []
            part = f".{names[0]}" if names else ""
            was, is_ = (old[names[0]], new.get(names[0])) if names else (old, new)
            raise ConfigError(
                f"cannot resume: {key}{part} was {was!r} and is now {is_!r}",
                f"{key}{part}={was} (or name=ANOTHER for a new run)",
            )
    if set(before.get("techniques", {})) != set(now.get("techniques", {})):
        changed = sorted(set(before.get("techniques", {})) ^ set(now.get("techniques", {})))
        raise ConfigError(
            f"cannot resume: the technique {changed[0]} was switched since the checkpoint",
            "name=ANOTHER for a new run",
        )
    for thing, digest in saved["fingerprint"].items():
        if fingerprint.get(thing) != digest:
            raise ConfigError(
                f"cannot resume: the {thing} changed since the checkpoint "
                f"(was {digest[:12]}, is {str(fingerprint.get(thing))[:12]})",
                f"restore the {thing}, or name=ANOTHER for a new run",
            )


def _at(values: Mapping[str, Any], key: str) -> Any:
    found: Any = values
    for part in key.split("."):
        found = found.get(part) if isinstance(found, Mapping) else None
    return found


def _restore_optimizer(
    route: str, optimizer: Any, named: Mapping[str, torch.nn.Parameter], saved: Saved
) -> None:
    """Recreate each parameter's state tensors and fill them."""
    for name, parameter in named.items():
        prefix = f"optimizer/{route}/{name}/"
        for full in saved.names_under(prefix):
            shape, dtype = saved.shape_of(full)
            if shape == tuple(parameter.shape):
                value = torch.zeros_like(parameter, dtype=dtype)
            else:
                value = torch.zeros(shape, dtype=dtype, device=parameter.device)
            saved.fill_(full, value)
            optimizer.state[parameter][full.removeprefix(prefix)] = value


def _rng(device: torch.device) -> dict[str, str]:
    states = {"cpu": torch.get_rng_state()}
    if device.type == "cuda":
        states["cuda"] = torch.cuda.get_rng_state(device)
    return {kind: bytes(state.tolist()).hex() for kind, state in states.items()}


def _set_rng(states: Mapping[str, str], device: torch.device) -> None:
    def tensor(text: str) -> Tensor:
        return torch.tensor(list(bytes.fromhex(text)), dtype=torch.uint8)

    torch.set_rng_state(tensor(states["cpu"]))
    if device.type == "cuda" and "cuda" in states:
        torch.cuda.set_rng_state(tensor(states["cuda"]), device)

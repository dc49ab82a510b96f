"""Tell the role of each parameter, and give every optimizer's groups the plan's factors by role.

Sources: modded-nanogpt and nanochat train embeddings at several times the rate of matrices; GPT-2
does not shrink vectors.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from torch import Tensor, nn

from headrace.parallel.layout import is_dtensor
from headrace.plan.optimizer_config import OptimizerConfig

Role = Literal["matrices", "embeddings", "head", "vectors"]


def role_of(name: str, dimensions: int) -> Role:
    """Return the role of a parameter.

    Args:
        name: its full name, as `blocks.0.mlp.down.weight`. Tables are called `position`, or have
            `embed` in the name of a module. A tied output matrix has the name of the table.
        dimensions: how many it has.
    """
    if dimensions < 2:
        return "vectors"
    first, *inner = name.split(".")
    if first == "head":
        return "head"
    if first == "position" or any("embed" in part for part in (first, *inner)):
        return "embeddings"
    return "matrices"


def _mesh_of(tensor: Tensor) -> Any:
    """Return the mesh over which a parameter is sliced; None where it is whole here."""
    return tensor.device_mesh if is_dtensor(tensor) else None


def group_by_role(
    groups: list[dict[str, Any]],
    named: Mapping[str, nn.Parameter],
    config: OptimizerConfig,
    factor: Callable[[str], float] = lambda name: 1.0,
) -> None:
    """Split an optimizer's groups, in place, so that each has one factor of rate and of decay.

    Every group gets `initial_lr`, the rate that its optimizer was made with, and `lr_factor`; a
    step multiplies both with the schedule's share, and `initial_weight_decay` with the decay's.
    Roles with equal factors stay in one group, since fused updates launch kernels for each group.
    One such kernel takes only slices of one mesh, or only whole tensors.

    Args:
        groups: `param_groups` of the optimizer; their dicts stay the same objects.
        named: its parameters by name.
        config: holds the factors.
        factor: (name of a parameter) -> a factor of its rate beside its role's.
    """
    own = {parameter: factor(name) for name, parameter in named.items()}
    roles = {parameter: role_of(name, parameter.ndim) for name, parameter in named.items()}
    split = []
    for group in groups:
        parts: dict[tuple[float, float, Any], list[nn.Parameter]] = {}
        for parameter in group["params"]:
            role = roles[parameter]
            rate = getattr(config.lr_factors, role) * own[parameter]
            key = (rate, getattr(config.decay_factors, role), _mesh_of(parameter))
            parts.setdefault(key, []).append(parameter)
        shared = {key: value for key, value in group.items() if key != "params"}
        for index, ((rate, decay, _), parameters) in enumerate(parts.items()):
            part = group if index == 0 else {}
            part |= {**shared, "params": parameters, "initial_lr": group["lr"], "lr_factor": rate}
            part["weight_decay"] = part["initial_weight_decay"] = shared["weight_decay"] * decay
            split.append(part)
    groups[:] = split

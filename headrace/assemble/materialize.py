"""Give weights their values, storage and sharding, block by block.

The model was made on the meta device. Here every parameter gets its value from `build.source`, is
cut to this rank's part, goes to the device, and is stored and sharded as techniques ask. Only then
the next block is touched, so that a device needs memory for one block beside its own part.
"""

import torch
from torch import nn

from headrace.assemble.sockets import Build
from headrace.assemble.vision import begin_images


def freeze(build: Build) -> None:
    """Turn off the gradient of each parameter that a technique froze."""
    for name, parameter in build.model.named_parameters():
        if any(frozen(name) for frozen in build.frozen):
            parameter.requires_grad_(False)


def materialize(build: Build) -> None:
    """Make weights real, give them their values, store and shard them, block by block."""
    model = build.model
    prefixes = {module: name for name, module in model.named_modules()}
    for module in [*model.blocks.values(), model]:
        _fill(build, module, prefixes[module])
        for shard in build.shard:
            shard(module)
    freeze(build)  # a shard may have made parameters anew
    if build.plan.vision is not None:
        begin_images(build)


def _fill(build: Build, root: nn.Module, prefix: str) -> None:
    """Give every meta parameter under `root` its storage and its value."""
    for path, module in root.named_modules(prefix=prefix):
        for key, parameter in list(module.named_parameters(recurse=False)):
            if not parameter.is_meta:
                continue
            name = f"{path}.{key}" if path else key
            value = build.given.get(name)
            if value is None or value.shape != parameter.shape:
                whole = build.source(name, parameter.shape)
                value = build.layouts[name].cut(build.world, whole)
                if value.shape != whole.shape:  # a slice would keep the whole on a host
                    value = value.clone(memory_format=torch.contiguous_format)
            value = value.to(build.device, parameter.dtype, copy=name in build.given)
            for store in build.storage:
                value = store(name, value)
            module.register_parameter(key, nn.Parameter(value, parameter.requires_grad))

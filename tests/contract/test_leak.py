"""The leak test: change document A, and document B's logits and gradients do not move.

Not within a tolerance: not at all. It runs on the baseline's attention with each kernel that torch
has for it here, and on every technique that fills `parts.attend`.
"""

from contextlib import AbstractContextManager, nullcontext

import house
import numpy as np
import pytest
import torch
from house import LENGTH, PACKING, Variant
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from headrace.assemble.sockets import Build, place
from headrace.data.rows import IGNORE, Row

KERNELS = {
    "cpu": (SDPBackend.MATH, SDPBackend.FLASH_ATTENTION),
    "cuda": (SDPBackend.MATH, SDPBackend.EFFICIENT_ATTENTION),
}
DOCUMENTS = ((0, 5), (5, 6), (6, LENGTH))
"""Where the documents of each row lie: one of them is a single token."""


def backends() -> list[object]:
    """Return (device, technique or None, kernel or None) of every backend."""
    found = []
    for device in ("cpu", "cuda"):
        mark = [pytest.mark.gpu] * (device == "cuda")
        found += [
            pytest.param(device, None, kernel, marks=mark, id=f"{device}-{kernel.name}")
            for kernel in KERNELS[device]
        ]
        found += [
            pytest.param(device, variant, None, marks=mark, id=f"{device}-{variant}")
            for name in house.names_on(device)
            for variant in house.variants(name, device)
            if "parts.attend" in house.CATALOGUE.find(name).claims
            and masks_documents(variant, device)
        ]
    return found


def masks_documents(variant: Variant, device: str) -> bool:
    """Whether it takes packed documents at all; refusing them is tested with the refusals."""
    techniques = (Variant(PACKING).technique(), variant.technique())
    plan = house.make_plan(*techniques, device=device)
    answer = variant.technique().supports(house.context_on(device, plan))
    return isinstance(answer, house.Supported)


def rows_with(own: int, *, changed: int | None) -> list[Row]:
    """Two rows where only document `own` has targets, and document `changed` has other tokens."""
    random = torch.Generator().manual_seed(0)
    rows = []
    for _ in range(2):
        ids = torch.randint(0, 300, (LENGTH + 1,), generator=random).numpy()
        targets = ids[1:].copy()
        begin, end = DOCUMENTS[own]
        targets[:begin] = targets[end:] = IGNORE
        if changed is not None:
            other = slice(*DOCUMENTS[changed])
            ids[other] = (ids[other] + 1) % 300
        rows.append(Row(ids, np.array([5, 6]), targets))
    return rows


def look(build: Build, rows: list[Row], own: int) -> dict[str, Tensor]:
    """Return logits of document `own`, gradients of its embeddings, and of all parameters."""
    kept: list[Tensor] = []
    watch = build.model.embed.register_forward_hook(lambda m, i, out: kept.append(out))
    kept_logits: list[Tensor] = []
    head = build.model.head.register_forward_pre_hook(lambda m, args: kept_logits.append(args[0]))
    try:
        (micro,) = house.make_micros(rows, micro_rows=0, segments=True)
        work = place(build, micro)
        build.model.zero_grad()
        with build.autocast():
            loss = build.model(
                work.ids_BT,
                work.targets_BT,
                work.rows,
                objective=build.objective,
                scale=torch.ones((), device=build.device),
            )
        kept[0].retain_grad()
        loss.backward()
    finally:
        watch.remove()
        head.remove()
    part = slice(*DOCUMENTS[own])
    states = kept_logits[0].unflatten(0, (2, LENGTH))[:, part]
    assert kept[0].grad is not None
    outside = torch.ones(LENGTH, dtype=torch.bool)
    outside[part] = False
    with build.autocast(), torch.no_grad():
        logits = build.model.head.logits(states, build.model.unembedding)
    return {
        "logits": logits,
        "embeddings": kept[0].grad[:, part].clone(),
        "outside": kept[0].grad[:, outside.to(build.device)].abs().max(),
        **house.gradients_of(build),
    }


@pytest.mark.parametrize(("device", "variant", "kernel"), backends())
@pytest.mark.parametrize("own", range(len(DOCUMENTS)))
def test_a_document_does_not_feel_its_neighbours(
    device: str, variant: Variant | None, kernel: SDPBackend | None, own: int
) -> None:
    packing = Variant(PACKING).technique()
    techniques = [packing, variant.technique()] if variant else [packing]
    shape = "gpt2" if kernel == SDPBackend.EFFICIENT_ATTENTION else "tied"  # it takes no groups
    build = house.random_build(house.make_plan(*techniques, device=device, shape=shape))
    only: AbstractContextManager[object] = sdpa_kernel(kernel) if kernel else nullcontext()
    with only:
        before = look(build, rows_with(own, changed=None), own)
        assert before["outside"] == 0, "a target's gradient reached another document"
        for changed in range(len(DOCUMENTS)):
            after = look(build, rows_with(own, changed=changed), own)
            moved = [n for n in before if not before[n].equal(after[n])]
            if changed == own:
                assert "logits" in moved and "embeddings" in moved
            else:
                assert not moved, f"document {changed} moved {moved} of document {own}"

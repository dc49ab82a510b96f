"""A loop that is not ours, under `headrace.watch`, and a technique in it that does nothing.

It is what people write: torch's own encoder layers with a causal mask, AdamW, one loop, autocast on
a GPU. Its shape is a workload's; its tokens are drawn here. The technique is adapters: they are
made and given to the optimizer, and nothing calls them.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from fault_hooks import Case, Facts
from torch import Tensor, nn

import headrace

STEPS = {"cpu": 40, "cuda": 24}
MOST_TOKENS = 8192
"""The most tokens of a step, since the loop holds all of its logits at once."""
FILE = "watched.json"


class Decoder(nn.Module):
    """Stack torch's encoder layers under a causal mask, which makes them a decoder."""

    def __init__(self, vocab: int, dim: int, heads: int, ffn: int, layers: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, ffn, 0.0, batch_first=True, norm_first=True)
            for _ in range(layers)
        )
        self.head = nn.Linear(dim, vocab)

    def forward(self, ids_BT: Tensor) -> Tensor:
        """Return the logits."""
        x_BTD = self.embed(ids_BT)
        mask = nn.Transformer.generate_square_subsequent_mask(ids_BT.size(1), ids_BT.device)
        for block in self.blocks:
            x_BTD = block(x_BTD, src_mask=mask, is_causal=True)
        return self.head(x_BTD)


@contextmanager
def idle(case: Case) -> Iterator[Facts]:
    """Add adapters with `severity` of the optimizer's parameters, and call none of them."""
    yield {"share": case.severity}


def train(case: Case) -> None:
    """Run the watched loop; write what the watch read to the folder of the run."""
    plan = case.plan()
    folder = Path(plan.directory) / plan.name
    folder.mkdir(parents=True)
    torch.manual_seed(plan.seed)
    device, steps = torch.device(plan.device), STEPS[plan.device]
    shape, length = plan.model, plan.data.sequence_length
    vocab = shape.vocab or plan.data.vocab
    with device:
        model = Decoder(vocab, shape.dim, shape.heads, shape.ffn, shape.layers)
    micros = list(model.parameters())
    if case.fault:
        count = sum(p.numel() for p in micros) * case.severity / (1 - case.severity)
        micros.append(nn.Parameter(torch.zeros(round(count), device=device)))
    optimizer = torch.optim.AdamW(micros, lr=1e-3)
    rows = max(1, min(plan.batch.tokens, MOST_TOKENS) // length)
    draw = torch.Generator().manual_seed(plan.seed)
    # A token is the one before it and a little more: there is something to learn.
    hops = torch.randint(1, 4, (steps, rows, length + 1), generator=draw)
    batches = list((hops.cumsum(-1) % vocab).to(device))
    with headrace.watch(model, optimizer, batches) as watched:
        for ids in watched.loader:
            with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
                logits = model(ids[:, :-1])
            targets = ids[:, 1:].flatten()
            loss = nn.functional.cross_entropy(logits.flatten(0, 1).float(), targets)
            loss.backward()
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            watched.note(loss=loss, grad_norm=norm, max_norm=1.0, tokens=ids[:, 1:].numel())
            optimizer.step()
            optimizer.zero_grad()
    watched.save(folder / FILE)

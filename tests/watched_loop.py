"""A foreign loop to be watched: a model that returns its loss, padded rows, and plain training."""

from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

VOCAB, TOKENS, ROWS = 11, 8, 2


class Tiny(nn.Module):
    """A language model that returns its loss, as those of Hugging Face do."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, 4)
        self.drop = nn.Dropout(0.1)
        self.head = nn.Linear(4, VOCAB)

    def forward(
        self, input_ids: torch.Tensor, labels: torch.Tensor, **_: Any
    ) -> dict[str, torch.Tensor]:
        logits = self.head(self.drop(self.embedding(input_ids)))
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten())
        return {"loss": loss, "logits": logits}


def rows(count: int = 12) -> list[dict[str, torch.Tensor]]:
    """Rows whose last two slots are padding, and whose first three are masked out."""
    made = []
    for seed in range(count):
        ids = torch.randint(0, VOCAB, (TOKENS,), generator=torch.Generator().manual_seed(seed))
        mask = torch.ones(TOKENS, dtype=torch.long)
        mask[-2:] = 0
        labels = ids.clone()
        labels[:3] = labels[-2:] = -100
        made.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return made


def setup() -> tuple[Tiny, torch.optim.Optimizer, Any]:
    """Return a model, its optimizer, and a loader that shuffles."""
    torch.manual_seed(0)
    model = Tiny()
    return (
        model,
        torch.optim.AdamW(model.parameters(), lr=0.1),
        DataLoader(rows(), batch_size=ROWS, shuffle=True),  # type: ignore[arg-type]
    )


def train(
    model: nn.Module, optimizer: Any, loader: Any, *, epochs: int = 2, micros: int = 1
) -> None:
    """Train in a plain loop, and evaluate after each epoch."""
    for _ in range(epochs):
        for index, batch in enumerate(loader, 1):
            model(**batch)["loss"].backward()
            if index % micros == 0:
                optimizer.step()
                optimizer.zero_grad()
        with torch.no_grad():
            model(**batch)

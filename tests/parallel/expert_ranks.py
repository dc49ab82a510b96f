"""What each rank of the exchange's test does: rows through divided experts, and through whole ones.

Every rank computes the reference from all ranks' rows itself, so nothing else is sent.
"""

from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from headrace.core.model_config import ModelConfig
from headrace.model.moe import ExpertLayer
from headrace.parallel.experts import ExpertExchange
from headrace.parallel.layout import share
from headrace.parallel.tensor import Peers, peers_of

CLOSE: Any = {"rtol": 1e-5, "atol": 1e-6}
D, FFN = 12, 8
EXPERTS = 5
ROUTES: dict[str, Any] = {
    "mixed": lambda rank: [3 + rank, 0, 1, 2 * rank, 4],
    "one expert takes all": lambda rank: [0, 0, 0, 7 + rank, 0],
    "the last rank gets no token": lambda rank: [5, 4 + rank, 0, 0, 0],
    "a rank has no row": lambda rank: [0] * 5 if rank == 1 else [1, 2, 3, 4, 5],
    "nobody has a row": lambda rank: [0] * 5,
}
"""Name -> rank -> its rows of each expert."""


def draw(seed: int, *shape: int) -> Tensor:
    """Draw equal numbers on every rank."""
    source = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=source, dtype=torch.float64)


def layer() -> ExpertLayer:
    """Return a layer of experts that are drawn equally on every rank."""
    config = ModelConfig(dim=D, heads=2, vocab=64)
    made = ExpertLayer(
        config, 0, experts=EXPERTS, top_k=1, ffn=FFN, balance=0.0, norm_topk=True
    ).double()
    whole = {"gate_up": draw(1, EXPERTS, 2 * FFN, D), "down": draw(2, EXPERTS, D, FFN)}
    for name, values in whole.items():
        made.register_parameter(name, torch.nn.Parameter(values))
    return made


def rows_of(rank: int, choices: list[int]) -> Tensor:
    """Return a rank's rows, sorted by expert."""
    return draw(10 + rank, sum(choices), D).requires_grad_()


def whole(peers: Peers, route: Any) -> tuple[list[Tensor], list[Tensor], ExpertLayer]:
    """Return what one process makes of each rank's rows, with gradients of rows and experts."""
    made = layer()
    rows = [rows_of(rank, route(rank)) for rank in range(peers.ranks)]
    outs = [made.multiply_all(x, torch.tensor(route(rank))) for rank, x in enumerate(rows)]
    sum((out * out.detach().cos()).sum() for out in outs).backward()  # type: ignore[union-attr]
    return rows, outs, made


def experts(backend: str) -> None:
    """Exchange rows forward and backward, whoever has them and whoever gets them."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    assert dist.group.WORLD is not None
    peers = peers_of(dist.group.WORLD)
    for name, route in ROUTES.items():
        check(name, route, peers, backend)
    dist.destroy_process_group()


def check(name: str, route: Any, peers: Peers, backend: str) -> None:
    """Compare this rank's rows, their gradients, and those of its experts with one process."""
    begin, count = share(EXPERTS, peers.ranks, peers.place)
    rows, outs, right = whole(peers, route)
    mine = layer()
    for key in ("gate_up", "down"):
        part = mine.get_parameter(key).detach()[begin : begin + count].clone()
        mine.register_parameter(key, torch.nn.Parameter(part))
    exchange = ExpertExchange(peers, EXPERTS, mine.multiply_all)
    x = rows_of(peers.place, route(peers.place))
    choices_E = torch.tensor(route(peers.place))
    torch.compiler.reset()
    compiled = partial(torch.compile, fullgraph=True, backend=backend, dynamic=False)
    run = compiled(lambda x, c: exchange(x, c)) if backend else exchange
    out = run(x, choices_E)
    wrong = lambda message: f"{name}: {message}"  # noqa: E731
    torch.testing.assert_close(out, outs[peers.place], **CLOSE, msg=wrong)
    (out * out.detach().cos()).sum().backward()
    torch.testing.assert_close(x.grad, rows[peers.place].grad, **CLOSE)
    for key in ("gate_up", "down"):
        wanted = right.get_parameter(key).grad
        assert wanted is not None
        found = mine.get_parameter(key).grad
        torch.testing.assert_close(found, wanted[begin : begin + count], **CLOSE)
    arrived = exchange.arrived_Re
    assert arrived is not None
    asked = [route(rank)[begin : begin + count] for rank in range(peers.ranks)]
    assert arrived.tolist() == asked, (name, arrived)

"""What each rank of the z-loss test does: the term on a slice of the vocabulary."""

import time
from typing import Any

import house
import test_predicts as traced
import torch

from headrace.assemble.build import make_build
from headrace.assemble.sockets import Build
from headrace.data.ingest import prepare
from headrace.parallel.world import open_world
from headrace.plan.plan import Plan

DEVICE = torch.device("cpu")


def split(ranks: int, corpus: str, prepared: str) -> None:
    """The loss is one process's, and the ledger's edit is what a rank's peak grows by.

    Beside whole logits, and beside chunks, of which no rank holds more than a slice.
    """
    torch.set_num_threads(1)
    house.put_data_in(corpus, prepared)
    whole, rows = traced.plan_of(layers=2, vocab=4096), house.make_rows(4000, ignored=True)
    cut = {"tensor_parallel": house.CATALOGUE.find("tensor_parallel")()}
    term = {"z_loss": house.CATALOGUE.find("z_loss").model_validate({"weight": 1.0})}
    right = house.take_step(house.build_of(whole.replaced(techniques=term)), rows).loss
    plan = whole.replaced(techniques=cut, mesh={"tensor": ranks})
    both = plan.replaced(techniques={**cut, **term})
    with open_world(plan.mesh, DEVICE) as world:

        def build_of(plan: Plan) -> Build:
            return make_build(plan, prepare(plan), world, DEVICE)

        def read(self: Any, *args: Any) -> Any:
            time.sleep(0.05)  # gloo's threads let go of the last collective's tensors
            return reading(self, *args)

        reading, traced.Traced._read = traced.Traced._read, read
        house.build_of = build_of
        found = house.take_step(build_of(both), rows).loss
        assert abs(found - right) < 1e-5 * right, (found, right)
        for size in (None, 64, 128):  # of 256 tokens
            name = "chunked_cross_entropy"
            head = house.Variant(name, {"chunk_tokens": size}).technique() if size else None
            beside = {**cut, **({name: head} if head else {})}
            plain, termed = (
                traced.Traced(plan.replaced(techniques={**beside, **more})) for more in ({}, term)
            )
            for one in (plain, termed):
                said = one.ledger.peak()[1]
                assert abs(said - one.peak) < 0.02 * one.peak, (size, said, one.peak)
            grown, told = termed.peak - plain.peak, termed.ledger.peak()[1] - plain.ledger.peak()[1]
            assert abs(grown - told) < 0.05 * told, (size, grown, told)

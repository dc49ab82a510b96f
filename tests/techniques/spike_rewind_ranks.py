"""What each rank of the test of spike_rewind does: a fault that only one rank sees."""

from typing import Any

import house
import torch

from headrace.assemble.build import make_build
from headrace.data.ingest import prepare
from headrace.parallel.layout import local_of
from headrace.parallel.world import open_world
from headrace.train.train import step

DEVICE = torch.device("cpu")
STEPS, AT = 14, 10


def both_go_back(corpus: str, prepared: str) -> None:
    """Check that all ranks mask the same steps, return to one state and end with equal weights."""
    torch.set_num_threads(1)
    house.put_data_in(corpus, prepared)
    for names in ((), ("fsdp",)):
        knobs: dict[str, Any] = {"every": 4, "window": 8}
        watch = house.CATALOGUE.find("spike_rewind").model_validate(knobs)
        others = {name: house.CATALOGUE.find(name)() for name in names}
        plan = house.make_plan(micro_rows=1).replaced(
            techniques={**others, "spike_rewind": watch}, mesh={"data": 2}
        )
        with open_world(plan.mesh, DEVICE) as world:
            build = make_build(plan, prepare(plan), world, DEVICE)
            for index in range(STEPS):
                if index == AT and world.rank == 1:
                    weight = build.model.get_parameter("blocks.0.mixer.qkv.weight")
                    local_of(weight.detach()).view(-1)[0] = 1e30
                numbers = step(build, build.loader.step(index).micros, index).tolist()
                if not numbers[2]:  # as the session does on a CPU
                    row = {"loss": numbers[0], "grad_norm": numbers[1]}
                    build.recover(build, index + 1, row)
            found = build.notes["spike_rewind"]
            (spike,) = found.spikes
            assert (spike.step, spike.rewound_to) == (AT + 1, (8,)), spike
            told = world.gather([found.values(), [*numbers]])
            assert told[0] == told[1], told
            for name, parameter in build.model.named_parameters():
                whole = build.whole(name, local_of(parameter.detach()))
                assert bool(torch.isfinite(whole).all()) and float(whole.abs().max()) < 100, name
            build.loader.close()

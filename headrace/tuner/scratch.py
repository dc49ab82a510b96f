"""Build a run that leaves nothing behind, and write what was measured of one.

`headrace lr-find` and `headrace check mup` train for some steps. Such a run has no folder, its
model and optimizers are dropped, and torch's random numbers go on as if it had not been.
"""

import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from headrace.assemble.build import make_build
from headrace.assemble.context import check_supported, choose_device, make_context
from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError
from headrace.core.files import write_whole
from headrace.core.progress import Progress
from headrace.parallel.world import open_world
from headrace.plan.plan import Plan
from headrace.report.page import Safe, page, tag, write_page
from headrace.train.train import prepare_together


@contextmanager
def scratch_build(plan: Plan, progress: Progress) -> Iterator[Build]:
    """Give the build of a plan, with its data, whose steps can be taken.

    Raises:
        ConfigError, UnsupportedError: the plan cannot run.
    """
    device = choose_device(plan)
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng([device] if device.type == "cuda" else []))
        world = stack.enter_context(open_world(plan.mesh, device))
        checked = check_supported(list(plan.techniques.values()), make_context(plan, device))
        prepared = prepare_together(plan, world, progress)
        torch.manual_seed(plan.seed + world.rank)
        build = make_build(plan, prepared, world, device, checked=checked)
        stack.callback(build.loader.close)
        for flags in build.runtime:
            stack.enter_context(flags())
        yield build


def write_measured(
    folder: Path, name: str, title: str, text: str, values: Mapping[str, Any], *body: Safe
) -> Path:
    """Write a page with lines of text and pictures, and values as JSON beside it; return the page.

    Args:
        folder: it is made where it is missing.
        name: of both files.
        title: of the page.
        text: lines for a reader, each a paragraph.
        values: JSON values; all numbers are finite.
        body: what follows the text on the page.

    Raises:
        ConfigError, RunError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / f"{name}.json", json.dumps(values, indent=1, allow_nan=False))
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be written: {error.strerror or error}", f"--out {name}"
        ) from None
    lines = [tag("p", line) for line in text.splitlines()]
    return write_page(folder / f"{name}.html", page(title, tag("h1", title), *lines, *body))

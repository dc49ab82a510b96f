"""This module holds what `headrace plan --budget` does: it chooses a plan, and writes it."""

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.cli.catalogue import catalogue
from headrace.cli.plans import named_plan, place
from headrace.cli.terminal import show_json
from headrace.core.errors import ConfigError, UnsupportedError
from headrace.core.files import shell, write_whole
from headrace.plan.plan import Plan
from headrace.predict.amounts import Budget, read_tokens
from headrace.predict.budget import Bought, buy
from headrace.predict.page import format_bought
from headrace.predict.ranks import start_words

if TYPE_CHECKING:
    Words = Iterable[str] | None

BARE = """
[model]
family = "headrace-small"

[data]
sequence_length = 1024

[goal]
steps = 1
"""
"""What a budget chooses a model for where no plan is named: Headrace's own decoder."""


def plan_budget(
    budget: str,
    name: str,
    words: "tuple[list[str] | None, list[str] | None, list[str] | None]",
    device_name: str,
    data: str,
    output: Path | None,
    *,
    as_json: bool,
) -> None:
    """Choose the plan that a budget buys, print it, and write it where that is asked for.

    Args:
        budget: what may be spent, as it was typed.
        name: the plan whose data, techniques and prices are kept; "" for Headrace's own decoder.
        words: the overrides, and what --with and --without name.
        device_name: a GPU that is not here; "" for the device that is.
        data: different tokens that there are, as it was typed; "" where it was not.
        output: where the plan goes; None writes none.
        as_json: print one JSON value.

    Raises:
        ConfigError, UnsupportedError: see `Budget.read`, `read_tokens`, `buy` and `_write`.
    """
    wanted, fresh = Budget.read(budget), read_tokens(data) if data else None
    overrides, add, drop = words
    if name:
        base = named_plan(name, overrides, add, drop, verb="plan")
    else:
        changes = {"overrides": overrides or [], "with_": add or [], "without": drop or []}
        base = Plan.read(BARE, catalogue(), **changes)
    if base.vision is not None:
        raise UnsupportedError(
            f"a budget chooses a decoder of text, and vision.architecture = "
            f"{base.vision.architecture!r} tells images apart",
            f"headrace plan {shell(name or 'vision-demo')}",
        )
    context, machine = place(base, device_name)
    bought = buy(wanted, base, context, machine, fresh_tokens=fresh, open_vocab=not name)
    if output is not None:
        _write(bought, output)
    if as_json:
        show_json({**bought.to_dict(), "file": None if output is None else str(output)})
        return
    print(format_bought(bought))
    if output is not None:
        print(f"next: {start_words(bought.plan)} train {shell(output)}")


def _write(bought: Bought, path: Path) -> None:
    """Write a plan as TOML under the budget that it was chosen for.

    Raises:
        ConfigError: nothing can be written there.
    """
    head = (
        f"# The plan that {bought.budget} buy: {bought.tokens_per_parameter:.3g} tokens a "
        f"parameter (Chinchilla: 20),\n# expected loss {bought.loss.nats:.3f} nats a token on the "
        "scaling law's own corpus.\n"
    )
    try:
        write_whole(path, head + bought.plan.to_toml())
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be written: {error.strerror or error}", "--out plan.toml"
        ) from None

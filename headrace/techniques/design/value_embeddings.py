"""Mix rows of further embedding tables into attention's values.

Each table has a row per entry of the vocabulary, as wide as all key-value heads. Block i and the
block as far from the end read table i, and their values are a v + b e, by two learned factors that
start at 0.5. So the first and the last layers can look up what a token means instead of computing
it: parameters without a matrix product. The tables are embeddings for the optimizer, and the
factors are vectors.

Rows are looked up once per table and handed on with what all layers share (model/from_embedding).
Under tensor parallelism a rank has the columns of its own heads. A pipeline's first stage has the
tables, and rows travel from stage to stage. It rewrites `model.value_embeddings`. Sources:
github.com/KellerJordan/modded-nanogpt; arXiv 2410.17897, where the first layer's values are shared.
"""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.keyed import Keyed
from headrace.assemble.sockets import Build
from headrace.core.errors import RefusalKind
from headrace.core.remedy import mend
from headrace.model.from_embedding import MixedValues
from headrace.plan.technique import Card, Context, Evidence, Supported, Unsupported

MIXER = "parts.mixer"


class ValueEmbeddings(Keyed):
    """Mix rows of further embedding tables into attention's values."""

    tables: int = Field(default=2, ge=1, le=64)
    """Tables, each of vocabulary x key-value features; tuner range 1 to 4."""

    claims: ClassVar[tuple[str, ...]] = ("config.value_embeddings",)
    symptoms: ClassVar[tuple[str, ...]] = ("recipe",)
    card: ClassVar[Card] = Card(
        buys="4.41 minutes in place of 4.66 to one loss in modded-nanogpt's record 14, for no "
        "matrix product",
        costs="vocabulary x key-value features more parameters for each table, at 16 bytes each "
        "with AdamW, and their update (derived)",
        helps="small models on much text, where a look-up is cheaper than another layer",
        hurts="large vocabularies beside few features, where tables outweigh the model; pipelines, "
        "whose borders rows of every table cross; export: no architecture here has it",
        source="github.com/KellerJordan/modded-nanogpt; arXiv 2410.17897",
    )

    def keys(self, plan: Any) -> Mapping[str, Any]:
        """Return `model.value_embeddings`; nothing where layers lack, which `supports` tells."""
        return {} if self.tables > _most(plan) else {"model.value_embeddings": self.tables}

    def supports(self, context: Context) -> Supported | Unsupported:
        """Require a layer at each end for each table, and attention that mixes its values."""
        plan, most = context.plan, _most(context.plan)
        if self.tables > most:
            return Unsupported(
                f"tables = {self.tables}, and {plan.model.layers} layers have at most {most}: each "
                "serves one of the first and one of the last",
                mend(f"techniques.{self.name()}.tables={most}"),
            )
        for name, other in plan.techniques.items():
            convolves = getattr(other, "convolves", None)
            if convolves and any(map(convolves, plan.model.table_of_layer)):
                return Unsupported(
                    f"{name} has no values in some of the layers that would mix a table in",
                    mend(f"-{name}"),
                    RefusalKind.COMBINATION,
                )
        return super().supports(context)

    def active(self, build: Build) -> Evidence:
        """Count this rank's layers that mix a table in, and the numbers of all tables."""
        blocks, config = build.model.blocks, build.config
        wanted = sum(int(name) in config.table_of_layer for name in blocks)
        first = build.world.place("pipeline") == 0
        if not (wanted or first):
            return Evidence(None, "this rank holds no block that mixes a table in")
        mixers: list[Any] = [block.mixer for block in blocks.values()]
        mixing = sum(isinstance(getattr(m, "value", None), MixedValues) for m in mixers)
        tables = len(build.model.value_embed)
        numbers = sum(prod(build.layouts[name].shape) for name in _names(tables))
        return Evidence(
            active=tables == self.tables * first and mixing == wanted,
            detail=f"{mixing} of {len(mixers)} layers mix rows of {tables} tables in, which hold "
            f"{numbers:,} numbers",
            numbers={"layers": mixing, "tables": tables, "numbers": numbers},
        )


def _most(plan: Any) -> int:
    """Return the most tables that the plan's layers can have."""
    return -(-plan.model.layers // 2)


def _names(tables: int) -> list[str]:
    """Return the names of the tables."""
    return [f"value_embed.{n}.weight" for n in range(tables)]

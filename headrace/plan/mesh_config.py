"""Define the mesh: how many processes split the work of a run, and along which axes."""

from collections.abc import Mapping
from math import prod
from typing import Any, ClassVar, Self

from pydantic import Field, model_validator

from headrace.core.limits import MOST
from headrace.core.remedy import mend
from headrace.core.strict import Strict, Wrong
from headrace.core.units import largest_divisor

RANKS = 1 << 20
"""Largest number of processes along one axis of the mesh."""


class MeshConfig(Strict):
    """Say how many processes split the work along each axis. The run has their product.

    Every axis but `data` needs a technique that splits the model along it.
    """

    words: ClassVar[Mapping[str, Mapping[str, Any]]] = {"auto": {"auto": True}}
    """Word that stands for the whole table -> the table."""

    data: int = Field(default=1, ge=1, le=RANKS)
    """Replicas that each read their share of every batch."""
    tensor: int = Field(default=1, ge=1, le=RANKS)
    """Parts of every matrix."""
    context: int = Field(default=1, ge=1, le=RANKS)
    """Parts of every sequence."""
    pipeline: int = Field(default=1, ge=1, le=RANKS)
    """Ranks that hold the model's layers one after the other."""
    replicate: int = Field(default=1, ge=1, le=RANKS)
    """Groups into which `data` is divided, each of which holds one copy of the model in slices;
    it adds no ranks. `fsdp` and `zero` slice within a group."""
    expert: int = Field(default=1, ge=1, le=RANKS)
    """Ranks of `data` x `context` that divide the experts of a mixture among themselves; it adds no
    ranks. `expert_parallel` does so."""
    patience_s: float = Field(default=45.0, ge=0, le=1e6)
    """Seconds after which a rank is named, and the run ends, that does not answer, or does nothing
    while others wait for it; 0 waits for ever."""
    compare_every_steps: int = Field(default=0, ge=0, le=MOST)
    """Steps between two comparisons of what several ranks hold copies of, which memory or links
    that err set apart; 0 compares nothing."""
    auto: bool = False
    """Choose the sizes for the processes that were started, by what each layout is predicted to
    take; `mesh = "auto"` says the same."""

    @model_validator(mode="before")
    @classmethod
    def _read_auto(cls, value: Any) -> Any:
        return cls.words[value] if isinstance(value, str) and value in cls.words else value

    @model_validator(mode="after")
    def _check_auto(self) -> Self:
        given = [f"mesh.{axis}={size}" for axis, size in self.sizes.items() if size > 1]
        if self.auto and given:
            raise Wrong(
                f"mesh.auto chooses the sizes of all axes, and {', '.join(given)} is given",
                mend("mesh.auto=false") | mend(*(f"mesh.{axis}=1" for axis in self.sizes)),
            )
        return self

    @model_validator(mode="after")
    def _check_replicate(self) -> Self:
        if self.data % self.replicate and not self.auto:
            near = largest_divisor(self.data, self.replicate)
            raise Wrong(
                f"mesh.data = {self.data} ranks do not divide into mesh.replicate = "
                f"{self.replicate} equal groups; the nearest is mesh.replicate={near}",
                mend(f"mesh.replicate={near}"),
            )
        if self.auto and self.replicate > 1:
            raise Wrong(
                f"mesh.auto chooses the sizes of all axes, and mesh.replicate={self.replicate} "
                "divides one of them",
                mend("mesh.replicate=1") | mend("mesh.auto=false"),
            )
        return self

    @model_validator(mode="after")
    def _check_expert(self) -> Self:
        group = self.data * self.context // self.replicate
        if self.auto and self.expert > 1:
            raise Wrong(
                f"mesh.auto chooses the sizes of all axes, and mesh.expert={self.expert} divides "
                "one of them",
                mend("mesh.expert=1") | mend("mesh.auto=false"),
            )
        if not self.auto and group % self.expert:
            reading = "mesh.data x mesh.context" if self.context > 1 else "mesh.data"
            near = largest_divisor(group, self.expert)
            raise Wrong(
                f"the {group} ranks of {reading} / mesh.replicate do not divide into groups of "
                f"mesh.expert = {self.expert}; the nearest is mesh.expert={near}",
                mend(f"mesh.expert={near}"),
            )
        return self

    @property
    def sizes(self) -> dict[str, int]:
        """Return the number of ranks along each axis."""
        return {
            "data": self.data,
            "tensor": self.tensor,
            "context": self.context,
            "pipeline": self.pipeline,
        }

    @property
    def ranks(self) -> int:
        """Return the number of processes of the run."""
        return prod(self.sizes.values())

    @property
    def left_open(self) -> str:
        """Return for a reader why one rank is predicted of a plan; "" where it names its layout."""
        if not self.auto:
            return ""
        return (
            "mesh.auto: one rank is predicted here, and a run lays out as many as torchrun starts; "
            "headrace plan PLAN mesh.auto=false mesh.data=N predicts N ranks, and --sweep beside "
            "it ranks their layouts"
        )

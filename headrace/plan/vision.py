"""Check that a plan for images asks for nothing that only text has."""

from typing import Any

from headrace.core.model_config import ModelConfig
from headrace.core.remedy import leave_out, mend
from headrace.core.strict import Wrong
from headrace.plan.data_config import DataConfig

OF_ALL_DATA = ("sequence_length", "directory", "workers", "prefetch")
"""Keys of `data` that mean the same for images."""


def check_vision(plan: Any) -> None:
    """Refuse keys of text beside the table `vision`, and rows of one token without it.

    Raises:
        Wrong: names the key, with what mends it.
    """
    if plan.vision is None:
        if plan.data.sequence_length < 2:
            raise Wrong(
                "data.sequence_length = 1, and a text needs rows of 2 tokens at least: only an "
                "image is a row of one, its label",
                mend("data.sequence_length=2"),
            )
        return
    name = plan.vision.architecture
    if plan.data.sequence_length != 1:
        raise Wrong(
            f"data.sequence_length = {plan.data.sequence_length}, and the rows of {name} have one "
            "token each: the label of an image",
            mend("data.sequence_length=1"),
        )
    for table, own, kept in (
        ("model", ModelConfig(), ("precision", "family")),
        ("data", DataConfig(), OF_ALL_DATA),
    ):
        given = getattr(plan, table)
        for key in type(given).model_fields:
            if key not in kept and getattr(given, key) != getattr(own, key):
                raise Wrong(
                    f"{table}.{key} = {getattr(given, key)!r} is a key of text, and {name} reads "
                    "images",
                    leave_out(f"{table}.{key}"),
                )
    if plan.eval.general:
        raise Wrong(
            f"eval.general = {plan.eval.general!r} is a text, and {name} reads images",
            mend("eval.general="),
        )
    if plan.attention == "measured":
        raise Wrong(
            f"attention = 'measured' times backends of attention, and {name} has none",
            mend("attention=plan"),
        )
    if plan.mesh.ranks > 1 or plan.mesh.auto:
        raise Wrong(
            f"{name} is trained by one process: the statistics of its normalisation are those of "
            f"one, and the mesh has {'any number' if plan.mesh.auto else plan.mesh.ranks}",
            mend("mesh.auto=false", *(f"mesh.{axis}=1" for axis in plan.mesh.sizes)),
        )

"""Techniques in a line, for what no real one does yet."""

from collections.abc import Callable, Mapping
from typing import Any

from headrace.assemble.sockets import Build
from headrace.plan.technique import Context, Evidence, Stage, Supported, Technique, Unsupported


def toy(
    name: str,
    stage: Stage,
    apply: Callable[[Build], Any],
    *,
    claims: tuple[str, ...] = (),
    composes: tuple[str, ...] = (),
    excludes: Mapping[str, str] | None = None,
    answer: Supported | Unsupported = Supported(),  # noqa: B008
    active: bool = True,
) -> Technique[Build]:
    """A technique that does `apply` and fills what it says."""

    class Toy(Technique[Build]):
        """Do nothing; it is a toy."""

        @classmethod
        def name(cls) -> str:
            return name

        def supports(self, context: Context) -> Supported | Unsupported:
            return answer

        def predict(self, ledger: Any) -> Any:
            return ledger

        def apply(self, build: Build) -> None:
            apply(build)

        def active(self, build: Build) -> Evidence:
            return Evidence(active, "a toy")

    Toy.stage, Toy.claims, Toy.composes = stage, claims, composes
    Toy.excludes = excludes or {}
    return Toy()

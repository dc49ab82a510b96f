"""Who filled which socket, and whether what was asked for is in force.

Neither believes a technique: what it touched is found by comparing the sockets before and after it,
and its evidence is read from the run.
"""

from typing import Any

from headrace.core.errors import RunError
from headrace.core.technique import Technique
from headrace.sockets import COMPOSED, OWNED, Build


def fillers(build: Build) -> dict[str, Any]:
    """What stands in every socket now, as something that compares."""
    now: dict[str, Any] = {name: getattr(build, name) for name in OWNED}
    now |= {f"parts.{key}": value for key, value in vars(build.parts).items()}
    now |= {f"config.{key}": value for key, value in build.config}
    for name in COMPOSED:
        value = getattr(build, name)
        now[name] = value.copy() if isinstance(value, list | dict) else value
    now["layouts"] = {name: repr(layout) for name, layout in build.layouts.items()}
    return now


def record(build: Build, technique: Technique[Any], before: dict[str, Any]) -> None:
    """Note which sockets `technique` touched since `before`; an undeclared one is a bug."""
    after = fillers(build)
    touched = [n for n in after if after[n] is not before[n] and after[n] != before[n]]
    undeclared = set(touched) - set(technique.claims) - set(technique.composes)
    assert not undeclared, f"{technique.name()} touched undeclared sockets {sorted(undeclared)}"
    for name in touched:
        build.filled.setdefault(name, []).append(technique.name())


def check_active(build: Build) -> dict[str, Any]:
    """After one step: every technique's evidence, on every rank that can have some.

    Raises:
        RunError: one that was asked for is not in force.
    """
    found = {}
    for technique in build.techniques:
        evidence = technique.active(build)
        told = build.world.gather((evidence.active, evidence.detail))
        wrong = [detail for active, detail in told if active is False]
        if wrong or all(active is None for active, _ in told):
            raise RunError(
                f"{technique.name()} was asked for and is not in force: {(wrong or told[0])[-1]}",
                f"--without {technique.name()}",
            )
        found[technique.name()] = evidence
    return found


def gone(build: Build) -> tuple[list[str], dict[str, str]]:
    """Techniques that were in force and are not any more, by their evidence on any rank.

    A run that is trained must not be lost by a look at it: where looking fails, the second value
    says so, by name.
    """
    found, unseen = [], {}
    for technique in build.techniques:
        try:
            active: bool | str | None = technique.active(build).active
        except Exception as error:
            active = f"nobody could look: {error}"
        told = build.world.gather(active)
        failed = [active for active in told if isinstance(active, str)]
        if False in told or all(active is None for active in told):
            found.append(technique.name())
        elif failed:
            unseen[technique.name()] = failed[0]
    return found, unseen

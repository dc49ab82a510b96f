"""Find the runs that share their first steps with a run, and render them as a tree.

A run that was begun at a checkpoint of another one (`train --branch`, or a resume that changed what
is learned) keeps in environment.json which run and step that was. Its relatives are looked for
beside it and beside its parents: nothing else knows where they lie.
"""

from dataclasses import dataclass
from pathlib import Path

from headrace.core.errors import HeadraceError
from headrace.core.files import is_within
from headrace.report.page import Safe, muted, section, table
from headrace.report.run_files import Report, read_run
from headrace.report.words import bits, whole
from headrace.train.run_folder import RunFolder

GENERATIONS = 64
"""Most parents that are followed: a chain that is longer leads in a circle."""


@dataclass(frozen=True)
class Member:
    """Hold a run of a family: its folder, where it begins, and its report where it has one."""

    directory: Path
    depth: int
    begins_at: int
    report: Report | None

    @property
    def own_steps(self) -> int | None:
        """Return the steps that it trained itself, without those of its parents."""
        steps = None if self.report is None else self.report.steps
        return None if steps is None else int(steps) - self.begins_at


def family_of(run: Path, within: Path | None = None) -> list[Member]:
    """Return a run's family in the order of its tree, the first run first; itself is in it.

    Args:
        run: its folder.
        within: relatives that do not lie in this folder are left out; None leaves out none.
    """
    root, folders = run.resolve(), [run.resolve().parent]

    def known(folder: Path) -> bool:
        return within is None or is_within(within, folder)

    for _ in range(GENERATIONS):
        parent = _parent(root)
        if parent is None or not parent[0].is_dir() or not known(parent[0]):
            break
        root = parent[0]
        folders.append(root.parent)
    children: dict[Path, list[tuple[int, Path]]] = {}
    for folder in dict.fromkeys(folders):
        for file in sorted(folder.glob("*/environment.json")):
            if not (known(file.parent) and known(file)):
                continue
            if (origin := _parent(file.parent)) is not None:
                children.setdefault(origin[0], []).append((origin[1], file.parent.resolve()))

    def tree(directory: Path, depth: int, begins_at: int) -> list[Member]:
        members = [Member(directory, depth, begins_at, _report(directory))]
        for step, child in sorted(children.pop(directory, [])):
            members += tree(child, depth + 1, step)
        return members

    return tree(root, 0, 0)


def _parent(run: Path) -> tuple[Path, int] | None:
    """Return the folder and the step that a run was begun at; None where it has no parent."""
    known = RunFolder(run).parent
    if known is None:
        return None
    folder = Path(str(known.get("run")))
    here = run.parent / folder.name  # runs may have been moved together
    return (folder if folder.is_dir() else here).resolve(), int(known.get("step", 0))


def _report(directory: Path) -> Report | None:
    """Return a run's report; None where it has not ended yet, or cannot be read."""
    try:
        return read_run(directory).report
    except HeadraceError:
        return None


def family_section(run: Path, within: Path | None = None) -> list[Safe]:
    """Render a run's family; nothing where it stands alone.

    Args:
        run: its folder.
        within: relatives that do not lie in this folder are left out; None leaves out none.
    """
    members = family_of(run, within)
    if len(members) < 2:
        return []
    rows = []
    for member in members:
        last = member.report.evaluated[-1] if member.report and member.report.evaluated else None
        mark = " (this run)" if member.directory == run.resolve() else ""
        rows.append(
            (
                f"{'- ' * member.depth}{member.directory.name}{mark}",
                f"step {member.begins_at}" if member.depth else "the beginning",
                whole(member.own_steps),
                bits(last and last.bits_per_byte),
                bits(last and last.loss_nats),
            )
        )
    heads = ("Run", "Begins at", "Own steps", "Bits per byte", "Nats per token")
    return [
        section(
            "Family",
            table("Family", heads, rows, text=2),
            muted(
                "Each run shares the steps before it with the run above it. Losses are the last."
            ),
        )
    ]

"""Keep what compilers made on disk, so that the next start of a run need not make it again.

Compiling a model takes seconds to minutes before its first step, and a restarted, resumed or
repeated run compiles the same graphs. torch keeps what it made by the content of the graph, of the
code and of the versions: joint graphs (AOTAutograd), generated code (inductor's FX graphs) and the
binaries of Triton's kernels. By default that lies in the machine's temporary folder, which a reboot
empties and other nodes do not see. Here all three lie in one folder that stays: `directory`.

What is kept there is code that a later run executes. So the folder belongs to one user, is made
with mode 0700, and is refused where another user owns it or may reach into it, and inside of
`directory` of the plan, whose runs are handed on. The process's settings are changed for the run
and restored. A graph that torch cannot keep is compiled each time, which it counts as bypassed.
Cost: disk, which nothing cleans up. Left out: caches that machines share over a network, and what
Dynamo traces, which is traced at every start.
Source: docs.pytorch.org, Compile Time Caching in torch.compile.
"""

import os
import stat
import sys
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from shlex import quote
from typing import Any, ClassVar

from pydantic import Field

from headrace.assemble.sockets import Build
from headrace.core.errors import ConfigError, RefusalKind
from headrace.core.remedy import Remedy, mend
from headrace.costs.ledger import Ledger
from headrace.plan.symptoms import LoopChange
from headrace.plan.technique import (
    Card,
    Context,
    Evidence,
    Stage,
    Supported,
    Technique,
    Unsupported,
)

KEEPING = "inductor"
"""The backend whose results are kept."""
CACHES = {"fx": ("inductor", "fxgraph_cache"), "aot": ("aot_autograd", "autograd_cache")}
"""Name of a cache -> where torch counts it, and under which name."""
KEPT = ("fxgraph", "aotautograd")
"""Names of torch's folders of both caches."""
OTHERS = stat.S_IRWXG | stat.S_IRWXO
"""Mode bits of a group and others. None may be set: torch makes folders inside that they could
write into."""


class CompileCache(Technique[Build]):
    """Keep what compilers made on disk, so that the next start need not make it again."""

    directory: str = Field(default="~/.cache/headrace/compile", min_length=1)
    """The folder that keeps it; one that all nodes see serves all of them."""

    timed: ClassVar[bool] = True
    room: ClassVar[str] = "compile"
    stage: ClassVar[Stage] = Stage.COMPILE
    composes: ClassVar[tuple[str, ...]] = ("runtime",)
    symptoms: ClassVar[tuple[str, ...]] = ("launch:compilation",)
    loop_changes: ClassVar[tuple[LoopChange, ...]] = ("kept compiled code",)
    card: ClassVar[Card] = Card(
        buys=(
            "a later start of the same plan: 18.8 s to the first step for 27.4 (1b on an "
            "H200, results/limits.jsonl), 2.1 s of compiling for 6.3",
            "code generation and its compilers, not the tracing of the model "
            "(docs.pytorch.org, Compile Time Caching in torch.compile)",
        ),
        costs=(
            "disk that nothing cleans up",
            "hashing each graph at its first call",
        ),
        helps="resumed and repeated runs, sweeps, many short runs, nodes that share a home",
        hurts="nothing known; a plan's first run gains nothing",
        source="docs.pytorch.org/tutorials/recipes/torch_compile_caching_tutorial.html",
    )

    def folder(self) -> Path:
        """Return `directory` as an absolute path."""
        return Path(self.directory).expanduser().resolve()

    def supports(self, context: Context) -> Supported | Unsupported:
        """Support plans that inductor compiles, and a folder that is this user's alone."""
        key = f"techniques.{self.name()}.directory"
        plan = context.plan
        on: Mapping[str, Technique[Any]] = plan.techniques if plan else {}
        compiling = [t for t in on.values() if "compiled" in t.composes]
        if not compiling:
            return Unsupported(
                "it keeps what a compiler made, and nothing is compiled",
                mend("+torch_compile"),
                RefusalKind.COMBINATION,
            )
        if (backend := getattr(compiling[0], "backend", KEEPING)) != KEEPING:
            return Unsupported(
                f"backend = {backend!r} makes nothing that could be kept",
                mend(f"techniques.{compiling[0].name()}.backend={KEEPING}"),
                RefusalKind.COMBINATION,
            )
        if sys.platform == "win32":
            return Unsupported(
                "whose a folder is cannot be told by its mode on Windows",
                "Linux",
                RefusalKind.SYSTEM,
            )
        folder = self.folder()
        if folder.is_relative_to(Path(plan.directory).resolve()):
            return Unsupported(
                f"{folder} lies in {plan.directory}/, where runs are kept and handed on, and what "
                "is kept here is executed",
                mend(f"{key}={type(self)().directory}"),
            )
        wrong = what_is_wrong(folder)
        if wrong:
            return Unsupported(wrong, _instead(folder), RefusalKind.SYSTEM)
        above = next(p for p in (folder, *folder.parents) if os.path.exists(p))
        if not above.is_dir():
            return Unsupported(
                f"{above} is no folder, so that {folder} cannot be",
                _instead(above),
                RefusalKind.SYSTEM,
            )
        if not os.access(above, os.W_OK | os.X_OK):
            return Unsupported(
                f"nothing can be written into {above}",
                f"chmod u+wx {quote(str(above))} if it is yours, or {key}=a folder that you can "
                "write into",
                RefusalKind.SYSTEM,
            )
        return Supported()

    def predict(self, ledger: Ledger) -> Ledger:
        """Leave memory and work as they are."""
        return ledger

    def apply(self, build: Build) -> None:
        """Let torch keep things there while the run lasts."""
        seen: dict[str, Any] = {"before": None, "folder": ""}
        build.notes[self.name()] = seen
        build.runtime.append(partial(kept_in, self.folder(), seen))

    def active(self, build: Build) -> Evidence:
        """Read from torch's counters which graphs were taken from the cache or newly kept."""
        seen, folder = build.notes[self.name()], self.folder()
        now, before = counted(), seen["before"]
        run = {} if before is None else {name: now[name] - before[name] for name in now}
        hits, misses, bypassed = (
            sum(run.get(f"{kind}_{what}", 0) for kind in CACHES)
            for what in ("hit", "miss", "bypass")
        )
        files = sum(path.is_file() for kind in KEPT for path in (folder / kind).rglob("*"))
        there = seen["folder"] == str(folder)
        return Evidence(
            active=there and hits + misses > 0 and files > 0,
            detail=f"{hits} graphs were found and {misses} newly made, {bypassed} were not kept; "
            f"{files} files of graphs in {folder if there else 'a folder that was not used'}",
            numbers={"hits": hits, "misses": misses, "bypassed": bypassed, "files": files},
        )


def what_is_wrong(folder: Path) -> str:
    """Return why code must not be run from `folder`; empty where it may, or it does not exist."""
    if not os.path.exists(folder):  # nor can it be looked at
        return ""
    status = folder.stat()
    if not stat.S_ISDIR(status.st_mode):
        return f"{folder} is not a folder"
    if status.st_uid != os.getuid():
        return f"{folder} belongs to user {status.st_uid}, and what lies there would be executed"
    if status.st_mode & OTHERS:
        return (
            f"other users may reach into {folder} (mode {stat.S_IMODE(status.st_mode):04o}, not "
            "0700), and what lies there would be executed"
        )
    return ""


def _instead(path: Path) -> Remedy:
    """Return what makes a folder that code may be run from: its own mode, or another beside it."""
    own = path.is_dir() and path.stat().st_uid == os.getuid()
    other = mend(f"techniques.{CompileCache.name()}.directory={path}-{os.getuid()}")
    return Remedy(text=f"chmod 700 {quote(str(path))}").otherwise(other) if own else other


@contextmanager
def kept_in(folder: Path, seen: dict[str, Any]) -> Iterator[None]:
    """Look for what is compiled while it lasts in `folder`, and keep it there.

    Raises:
        ConfigError: it cannot be made, or another user owns it or may reach into it.
    """
    from torch._functorch import config as autograd
    from torch._inductor import config as inductor
    from torch._inductor.runtime.cache_dir_utils import cache_dir, temporary_cache_dir
    from torch._inductor.utils import _set_env

    key = f"techniques.{CompileCache.name()}.directory"
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{folder} cannot be made: {error.strerror or error}",
            f"{key}=FOLDER that you can write into",
        ) from error
    if wrong := what_is_wrong(folder):  # it may have been made by another in between
        raise ConfigError(wrong, _instead(folder))
    with ExitStack() as settings:
        settings.enter_context(temporary_cache_dir(str(folder)))
        settings.enter_context(_set_env("TRITON_CACHE_DIR", str(folder / "triton")))
        settings.enter_context(inductor.patch(fx_graph_cache=True))
        settings.enter_context(autograd.patch(enable_autograd_cache=True))
        seen["folder"] = cache_dir()
        if seen["before"] is None:
            seen["before"] = counted()
        yield


def counted() -> dict[str, int]:
    """Return hits, misses and bypasses of both caches in this process so far, as torch counts."""
    from torch._dynamo.utils import counters

    return {
        f"{kind}_{what}": int(counters[where][f"{name}_{what}"])
        for kind, (where, name) in CACHES.items()
        for what in ("hit", "miss", "bypass")
    }

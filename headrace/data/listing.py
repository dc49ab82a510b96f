"""Which files a source names: a file, a folder, a glob, or the standard library.

Files come in a fixed order, each once, however many links lead to it. Whatever is met and is none
of them is counted in a tally, with its reason.
"""

import errno
import glob
import json
import os
import re
import shlex
import stat
import sysconfig
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from functools import cache
from pathlib import Path

from headrace.core.errors import ConfigError, alike, is_out_of_memory
from headrace.core.files import printable, shell
from headrace.data.left_out import LeftOutTally, Reason

PLAIN = frozenset({".txt", ".md", ".py"})
LINES = frozenset({".jsonl", ".ndjson"})
TABLES = {".csv": ",", ".tsv": "\t"}
JSON = frozenset({".json"})
READABLE = PLAIN | LINES | JSON | {".parquet", *TABLES}
COMPRESSION = {".gz": "gzip", ".zst": "zstd", ".bz2": "bz2", ".xz": "xz"}
DECOMPRESS = {"gzip": "gzip -dc", "zstd": "zstd -dc", "bz2": "bzip2 -dc", "xz": "xz -dc"}
"""The commands that write a compressed file on standard output."""
ARCHIVES = {".zip": "unzip", ".tar": "tar -xf", ".tgz": "tar -xf"}
"""The commands that take files out of an archive."""
SHOWN = 8
"""Kinds of files that a message lists."""
_TEMPORARY = re.compile(
    r"~\$.*|#.*#|.*~|.*\.(?:tmp|temp|part|partial|crdownload|download|incomplete|swp|lock)", re.I
)
"""Names of files that editors, Office and downloads leave behind or have not finished."""
_TEMPORARY_FOLDERS = frozenset(
    {"_temporary", "_delta_log", "_spark_metadata", "__MACOSX", "lost+found", "$RECYCLE.BIN"}
)
"""Folders of what Hadoop and Spark have not committed or note of it, and of file systems: rows in
`_temporary` stand in the table, too, once it is whole."""
_NOT_LIBRARY = frozenset(
    {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
)
_READABLE = f"the kinds are {' '.join(sorted(READABLE))} (and .gz, .zst, .bz2 or .xz of them)"

File = tuple[str, Path]
"""(Name to show, path)."""


@dataclass(frozen=True)
class Asked:
    """A source as the plan names it.

    Args:
        source: what it names.
        key: where.
        beside: everything that it names there.
        as_list: whether even one name is written as a list there.
    """

    source: str
    key: str = "data.sources"
    beside: tuple[str, ...] = ()
    as_list: bool = False

    def __str__(self) -> str:
        return f"{self.key} = '{printable(self.source)}'"

    def to(self, other: str | Path) -> str:
        """Return how the key names another source instead, and the rest as before."""
        every = [str(other) if one == self.source else one for one in self.beside]
        return self._naming(every or [str(other)])

    def without(self) -> str:
        """Return the key without this source; it names another where there is none beside it."""
        return self._naming([one for one in self.beside if one != self.source] or ["PATH"])

    def _naming(self, names: Sequence[str]) -> str:
        """Return the key with these names, as it is typed."""
        if len(names) > 1 or self.as_list:
            return f"{self.key}={shlex.quote(json.dumps(names, ensure_ascii=False))}"
        return f"{self.key}={shell(names[0])}"


def kind_of(path: Path) -> tuple[str, str | None]:
    """Return (suffix without compression, compression), e.g. ('.jsonl', 'gzip')."""
    compression = COMPRESSION.get(path.suffix.lower())
    return Path(path.stem if compression else path.name).suffix.lower(), compression


def list_files(asked: Asked, tally: LeftOutTally) -> list[File]:
    """Return the readable files of a local source, sorted.

    Raises:
        ConfigError: there is none; says what is there instead.
    """
    source = asked.source
    if source == "stdlib":
        return _standard_library()
    if not source:  # which pathlib takes for the current folder
        raise ConfigError(f"{asked.key} names an empty path", asked.to("PATH"))
    path = Path(os.path.expanduser(source))  # leaves a user alone who is not here
    try:
        if path.is_dir():
            return _folder(path, asked, tally)
        if path.is_file():
            return [(source, _readable(path, asked))]
        if path.exists():  # a pipe, a socket, a device: a corpus is read more than once
            raise ConfigError(
                f"{asked} is neither a file nor a folder, and text is read twice",
                f"cat {shell(source)} > TEXT.txt, and {asked.to('TEXT.txt')}",
            )
        pattern = _with_folders_escaped(path)
        if glob.has_magic(source) and (glob.glob(str(pattern)) or not _meant(asked)):
            return _matched(pattern, asked, tally)
        raise _missing(path, asked)
    except OSError as error:
        if is_out_of_memory(error):
            raise
        if error.errno == errno.EACCES:
            raise _closed(path, asked) from None
        raise ConfigError(f"{asked} cannot be read: {error.strerror}", asked.to("PATH")) from None


def _globbed(source: str) -> list[str]:
    """Return what a source matches as a pattern, or names as a path."""
    return glob.glob(str(_with_folders_escaped(Path(os.path.expanduser(source)))))


def _with_folders_escaped(pattern: Path) -> Path:
    """Return a glob in which folders that exist by their very names, as `[1]`, mean themselves."""
    parts = pattern.parts
    return Path(
        *(
            glob.escape(part) if Path(*parts[: i + 1]).is_dir() else part
            for i, part in enumerate(parts)
        )
    )


def _closed(path: Path, asked: Asked) -> ConfigError:
    """Name the first folder on the way that is closed; those beneath may be closed too."""
    folders = [*reversed(path.parents), *([path] if _is_folder(path) else [])]
    first = next((n for n, one in enumerate(folders) if _is_closed(one)), -1)
    return ConfigError(
        f"{asked} cannot be read: this user may not look into {printable(folders[first])}",
        f"chmod u+rx {' '.join(map(shell, folders[first:]))}",
    )


def _is_closed(folder: Path) -> bool:
    try:
        os.stat(os.path.join(folder, "."))
    except PermissionError:
        return True
    return False


def _missing(path: Path, asked: Asked) -> ConfigError:
    if path.is_symlink():
        return ConfigError(
            f"{asked} is a link that leads nowhere, to {printable(os.readlink(path))}",
            asked.to("PATH"),
        )
    if meant := _meant(asked):
        return _not_one(asked, *meant)
    siblings = [p.name for p in path.parent.iterdir()] if path.parent.is_dir() else []
    close = alike(path.name, siblings)
    hint = path.parent / close if close else None
    return ConfigError(
        f"{asked} does not exist"
        + (f"; the nearest name there is {printable(hint)}" if hint else ""),
        asked.to(hint or "PATH"),
    )


def _several(source: str) -> list[str]:
    """Return the sources that a text names with commas, blanks or braces; none if it names none.

    All of them are there, so nothing of what was meant is left out.
    """
    if braces := re.fullmatch(r"(.*)\{([^{}]*,[^{}]*)\}(.*)", source):
        before, inside, behind = braces.groups()
        each = [f"{before}{part}{behind}" for part in inside.split(",")]
        return [one for one in each if _globbed(one)]
    for sign in (r"\s*[,;]\s*", r"\s+", ":"):
        each = [one for one in re.split(sign, source) if one]
        if len(each) > 1 and all(_globbed(one) for one in each):
            return each
    return []


def _meant(asked: Asked) -> tuple[str, str] | None:
    """Return what a source is that is no path, and the setting that names it, or None."""
    source, own = asked.source, asked.key == "data.validation"
    if own and (share := re.fullmatch(r"(\d+(?:\.\d+)?)\s*%", source)):
        return "is a share of a hundred", f"{asked.key}={float(share[1]) / 100:g}"
    if others := _several(source):
        if len(others) == 1:
            return "has braces, of which one part is there", asked.to(others[0])
        if own:
            folder = f"mkdir held-out && cp -r {' '.join(map(shell, others))} held-out"
            return "names several, and a folder does so", f"{folder}, and {asked.to('held-out')}"
        before = asked.beside or (source,)
        every = [new for one in before for new in (others if one == source else [one])]
        named = shlex.quote(json.dumps(every, ensure_ascii=False))
        return "names several, and a list does so", f"{asked.key}={named}"
    scheme, _, rest = source.partition("://")
    if not rest:
        return None
    name = rest.rstrip("/").rpartition("/")[2] or "PATH"
    fetch = f"curl -LO {shell(source)}, and {asked.to(name)}"
    web = scheme in ("http", "https")
    return "is an address, and files of this machine are read", fetch if web else asked.to("PATH")


def _not_one(asked: Asked, what: str, remedy: str) -> ConfigError:
    return ConfigError(f"{asked} does not exist: it {what}", remedy)


def _readable(path: Path, asked: Asked) -> Path:
    """Return a file that the user named, or raise what can be done about its kind."""
    kind, compression = kind_of(path)
    if kind in READABLE:
        return path
    packed = path.suffix if compression else ""
    as_text = f"{path.name.removesuffix(packed)}.txt{packed}"
    unpack = next((c for end, c in ARCHIVES.items() if path.name.lower().find(end) > 0), None)
    raise ConfigError(
        f"{asked} is not of a kind that can be read; {_READABLE}",
        f"{unpack} {shell(path)}, and {asked.to('FOLDER')} with what was in it"
        if unpack
        else f"cp {shell(path)} {shell(as_text)}, and {asked.to(as_text)}, if it is text",
    )


def _folder(folder: Path, asked: Asked, tally: LeftOutTally) -> list[File]:
    """Return the readable files under a folder, without hidden ones and caches."""
    paths = sorted(_walk(folder, tally))
    endings: Counter[str] = Counter()
    files = _kept(paths, tally, endings)
    if not files:
        raise _nothing(f"{asked} holds", folder, asked, tally, endings)
    return files


def _matched(pattern: Path, asked: Asked, tally: LeftOutTally) -> list[File]:
    """Return the readable files that a glob matches."""
    paths = sorted(_expand(pattern, tally))
    folders = [p for p in paths if p.is_dir()]
    matched = [p for p in paths if not p.is_dir()]
    endings: Counter[str] = Counter()
    files = _kept(matched, tally, endings)
    reached = {above for path in matched for above in path.parents}
    for folder in folders:
        if folder not in reached and pattern.name != "**":
            tally.add(Reason.FOLDER, f"{folder}/")
    if not files:
        parts = pattern.parts
        plain = next(i for i, part in enumerate(parts) if glob.has_magic(part))
        above = Path(*parts[:plain]) if plain else Path()
        raise _nothing(f"{asked} matches no readable file:", above, asked, tally, endings)
    return files


def _kept(paths: Iterable[Path], tally: LeftOutTally, endings: Counter[str]) -> list[File]:
    """Return the files that can be read, each once; count the others in `tally`."""
    files: list[File] = []
    seen: set[object] = set()
    for path in paths:
        reason, identity = _look(path)
        if reason is None and identity in seen:
            reason = Reason.TWICE
        if reason is None:
            seen.add(identity)
            files.append((str(path), path))
            continue
        tally.add(reason, path)
        if reason is Reason.ENDING:
            kind, compression = kind_of(path)
            endings[kind + (path.suffix.lower() if compression else "")] += 1
    return files


def _look(path: Path) -> tuple[Reason | None, object]:
    """Return why a file is not read, or None, and what distinguishes it from other files."""
    try:
        info = path.stat()
    except PermissionError:
        return Reason.NO_PERMISSION, None
    except OSError as error:
        if error.errno in (errno.ENOENT, errno.ELOOP, errno.ENOTDIR):
            return Reason.BROKEN_LINK, None
        raise
    reason = None
    if not stat.S_ISREG(info.st_mode):
        reason = Reason.SPECIAL
    elif _TEMPORARY.fullmatch(path.name):
        reason = Reason.TEMPORARY
    elif kind_of(path)[0] not in READABLE:
        reason = Reason.ENDING
    elif not info.st_size:
        reason = Reason.EMPTY_FILE
    elif not os.access(path, os.R_OK):
        reason = Reason.NO_PERMISSION
    return reason, _identity(path, info)


def _identity(path: Path, info: os.stat_result) -> object:
    """Return what tells a file or folder from all others: some file systems give no numbers."""
    return (info.st_dev, info.st_ino) if info.st_ino else path.resolve()


def _walk(folder: Path, tally: LeftOutTally) -> Iterator[Path]:
    """Yield the files under a folder, through links too, each folder once."""
    seen = set[object]()
    waiting: list[tuple[Path, frozenset[object]]] = [(folder, frozenset())]
    while waiting:
        inside, above = waiting.pop()
        identity = _identity(inside, inside.stat())
        if identity in seen:
            tally.add(Reason.CIRCLE if identity in above else Reason.TWICE, f"{inside}/")
            continue
        seen.add(identity)
        try:
            names = sorted(inside.iterdir())
        except PermissionError:
            if not above:
                raise
            tally.add(Reason.NO_PERMISSION, f"{inside}/")
            continue
        folders = []
        for path in names:
            if path.name.startswith("."):
                tally.add(Reason.HIDDEN, path)
            elif path.name == "__pycache__":
                tally.add(Reason.CACHE, f"{path}/")
            elif path.name in _TEMPORARY_FOLDERS and _is_folder(path):
                tally.add(Reason.TEMPORARY, f"{path}/")
            elif _is_folder(path):
                folders.append((path, above | {identity}))
            else:
                yield path
        waiting += reversed(folders)


def _is_folder(path: Path) -> bool:
    try:
        return path.is_dir()
    except OSError:  # what it is then, is told of it as of a file
        return False


def _expand(pattern: Path, tally: LeftOutTally) -> Iterator[Path]:
    """Yield what a glob matches. `**` follows links to folders, each folder once.

    The library's own would follow links in circles, and go through each of them again and again.
    """
    parts = pattern.parts
    if "**" not in parts:
        yield from map(Path, glob.iglob(str(pattern)))
        return
    at = parts.index("**")
    base = str(Path(*parts[:at])) if at else "."
    beneath = LeftOutTally()
    for folder in sorted(glob.glob(base)) if glob.has_magic(base) else [base]:
        for path in _walk(Path(folder), beneath) if Path(folder).is_dir() else ():
            if _matches(path.relative_to(folder).parts, parts[at:]):
                yield path
    tally.take(beneath, Reason.CIRCLE, Reason.TWICE, Reason.NO_PERMISSION)


def _matches(names: tuple[str, ...], pattern: tuple[str, ...]) -> bool:
    if not pattern:
        return not names
    if pattern[0] == "**":
        rest = pattern[1:] or ("*",)
        return any(_matches(names[i:], rest) for i in range(len(names) + 1))
    return bool(names) and fnmatch(names[0], pattern[0]) and _matches(names[1:], pattern[1:])


def _nothing(
    says: str, folder: Path, asked: Asked, tally: LeftOutTally, endings: Counter[str]
) -> ConfigError:
    """Say what there is where no readable file was found."""
    counts = [f"{n:,} {ending or 'without an ending'}" for ending, n in endings.most_common(SHOWN)]
    if more := sum(n for _, n in endings.most_common()[SHOWN:]):
        counts.append(f"{more:,} of other kinds")
    others = [r.format() for r in tally.records if r.reason is not Reason.ENDING]
    present = ", ".join([*counts, *others])
    remedy = asked.to("PATH")
    if endings:
        (ending, _), *_ = endings.most_common(1)
        name = f"-name {shlex.quote(f'*{ending}')}" if ending else "! -name '*.*'"
        command = DECOMPRESS.get(COMPRESSION.get(Path(ending or "x").suffix or ending, ""), "cat")
        remedy = (
            f"find {shell(folder)} -type f {name} -exec sh -c "
            f"""'{command} "$1" > "$1.txt"' _ {{}} ';', if these are text, """
            f"and {asked.to(folder)}"
        )
    elif any(r.reason is Reason.NO_PERMISSION for r in tally.records):
        remedy = f"chmod -R u+rX {shell(folder)}"
    return ConfigError(
        f"{says} {f'only {present}' if present else 'no files'}; {_READABLE}", remedy
    )


def _standard_library() -> list[File]:
    """Return the interpreter's own .py files without tests and installed packages."""
    root = Path(sysconfig.get_paths()["stdlib"])
    kept = _library_under(root)
    if not kept:
        raise ConfigError(f"this Python has no library sources under {root}", "data.sources=PATH")
    return list(kept)


@cache
def _library_under(root: Path) -> tuple[File, ...]:
    """Return the files of a library, which are listed once: they are thousands."""
    files = [(p.relative_to(root), p) for p in root.rglob("*.py")]
    kept = [(n.as_posix(), p) for n, p in files if not _NOT_LIBRARY.intersection(n.parts)]
    return tuple(sorted(kept))

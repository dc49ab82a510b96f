"""A file of text that is being read, and the commands that mend what is wrong with it.

A command keeps the file under another name, which is then told as left out, and writes it again
without the fault: the same command of ours then goes on.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.core.errors import ConfigError
from headrace.core.files import shell
from headrace.core.units import format_bytes
from headrace.data.contents import guess
from headrace.data.fields import TextReading, text_of
from headrace.data.left_out import LeftOutTally, Reason
from headrace.data.listing import DECOMPRESS, Asked, kind_of
from headrace.data.number_column import NumberColumn

TextAndOrigin = tuple[str | None, str]
"""(A row's text or its null, where it came from)."""
MOST_DOCUMENT_BYTES = 1 << 30
"""Size of the largest line, file or value that is one document. It is held whole, and up to five
times while it is decoded, split and encoded."""
REPLACEMENT = "\ufffd".encode()
COMPRESS = {"gzip": "gzip -c", "zstd": "zstd -c", "bz2": "bzip2 -c", "xz": "xz -c"}


@dataclass(frozen=True)
class TextFile:
    """A file that is being read.

    Args:
        path: where it is.
        name: what it is called in messages.
        reading: how rows and files become texts.
        tally: counts the rows that give none.
        asked: what names this very file, not a folder that holds it; or a remote file's source.
        column: notes a number of each row.
        is_remote: whether `path` is a copy of a file in an object store.
    """

    path: Path
    name: str
    reading: TextReading
    tally: LeftOutTally
    asked: Asked | None = None
    column: NumberColumn | None = None
    is_remote: bool = False

    def kept(self) -> Path:
        """Return the name under which a command keeps the file, which no other has."""
        names = (Path(f"{self.path}.bad{number}") for number in ("", *range(2, 1000)))
        return next(path for path in names if not path.exists())

    def without(self) -> str:
        """Return what takes the file out of the text: a command, or a key where it is named."""
        return self.asked.without() if self.asked and not self.is_remote else self.aside()

    def aside(self) -> str:
        """Return the command that gives the file a name that is not read."""
        if self.is_remote and self.asked:
            return self.mended_copy(self.asked)
        return f"mv {shell(self.path)} {shell(self.kept())}"

    def mended_copy(self, asked: Asked) -> str:
        """Return what mends a file of an object store, which no command of ours writes to."""
        return f"a copy of it on this machine, mended, and {asked.to('PATH')}"

    def replaced(self, command: str, other: Path) -> str:
        """Return a command that writes the text into another file, and the key that names that."""
        if self.is_remote and self.asked:
            return self.mended_copy(self.asked)
        return f"{command}, and {self.asked.to(other)}" if self.asked else command

    def through(self, command: str) -> str:
        """Return the command that writes the file again through a filter, and keeps the old one."""
        if self.is_remote and self.asked:
            return self.mended_copy(self.asked)
        file, bad = shell(self.path), shell(self.kept())
        compression = kind_of(self.path)[1]
        if compression is None:
            return f"mv {file} {bad} && {command} < {bad} > {file}"
        unpack, pack = DECOMPRESS[compression], COMPRESS[compression]
        return f"mv {file} {bad} && {unpack} < {bad} | {command} | {pack} > {file}"

    def unpacked(self, packed: str | None) -> str:
        """Return the command that writes the file again as its name says that it is compressed.

        Args:
            packed: how its bytes are compressed.
        """
        if self.is_remote and self.asked:
            return self.mended_copy(self.asked)
        file, bad = shell(self.path), shell(self.kept())
        says = kind_of(self.path)[1]
        steps = [DECOMPRESS[packed]] if packed else []
        first, *others = [*steps, COMPRESS[says]] if says else steps
        return f"mv {file} {bad} && {' | '.join([f'{first} < {bad}', *others])} > {file}"

    def without_lines(self, first: int, last: int | None = None) -> str:
        """Return the command that takes lines out."""
        lines = f"{first}" if last in (None, first) else f"{first},{last}"
        return self.through(f"sed {lines}d")

    def text_of(self, row: Any, origin: str, remedy: Callable[[], str]) -> str | None:
        """Return the text of a row, or None for a null; see `fields.text_of`."""
        if self.column is not None:
            self.column.note(row)
        return text_of(row, self.reading, origin, remedy)

    def count_replaced(self, text: str, raw: bytes, where: str) -> None:
        """Count the bytes that became U+FFFD when `raw` was decoded; its own are none of them."""
        if count := text.count("\ufffd") - raw.count(REPLACEMENT):
            self.tally.add(Reason.NOT_UTF_8, where, count)

    def too_large(self, where: str, remedy: str) -> ConfigError:
        """Return the error of a document that is too large to be held whole."""
        return ConfigError(
            f"{where} is one document of more than {format_bytes(MOST_DOCUMENT_BYTES)}, the most "
            "that is held at once; data.separator=TEXT cuts at a text that stands between "
            "documents",
            remedy,
        )

    def decoded(self, raw: bytes, where: str, before_bytes: int = 0) -> str:
        """Return bytes as text.

        Raises:
            ConfigError: they are not UTF-8, and such bytes are not to be replaced.
        """
        if self.reading.replace:
            text = raw.decode(errors="replace")
            self.count_replaced(text, raw, where)
            return text
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            best, offset = guess(raw, error.start), before_bytes + error.start
            raise ConfigError(
                f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset:,}; "
                f"{best.description}; data.invalid_utf8=replace counts such bytes and goes on",
                self.through(best.script) if best.script else self.without(),
            ) from None

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
from headrace.data.contents import guess
from headrace.data.fields import text_of
from headrace.data.left_out import LeftOutTally
from headrace.data.listing import DECOMPRESS, Asked, kind_of

TextAndOrigin = tuple[str | None, str]
"""(A row's text or its null, where it came from)."""
COMPRESS = {"gzip": "gzip -c", "zstd": "zstd -c", "bz2": "bzip2 -c", "xz": "xz -c"}


@dataclass(frozen=True)
class TextFile:
    """A file that is being read.

    Args:
        path: where it is.
        name: what it is called in messages.
        text_key: the field that holds the text.
        tally: counts the rows that give none.
        asked: what names this very file, not a folder that holds it.
    """

    path: Path
    name: str
    text_key: str
    tally: LeftOutTally
    asked: Asked | None = None

    def kept(self) -> Path:
        """Return the name under which a command keeps the file, which no other has."""
        names = (Path(f"{self.path}.bad{number}") for number in ("", *range(2, 1000)))
        return next(path for path in names if not path.exists())

    def without(self) -> str:
        """Return what takes the file out of the text: a command, or a key where it is named."""
        return self.asked.without() if self.asked else self.aside()

    def aside(self) -> str:
        """Return the command that gives the file a name that is not read."""
        return f"mv {shell(self.path)} {shell(self.kept())}"

    def replaced(self, command: str, other: Path) -> str:
        """Return a command that writes the text into another file, and the key that names that."""
        return f"{command}, and {self.asked.to(other)}" if self.asked else command

    def through(self, command: str) -> str:
        """Return the command that writes the file again through a filter, and keeps the old one."""
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
        return text_of(row, self.text_key, origin, remedy)

    def decoded(self, raw: bytes, where: str, before_bytes: int = 0) -> str:
        """Return bytes as text.

        Raises:
            ConfigError: they are not UTF-8.
        """
        try:
            return raw.decode()
        except UnicodeDecodeError as error:
            best, offset = guess(raw, error.start), before_bytes + error.start
            raise ConfigError(
                f"{where} is not UTF-8: byte 0x{raw[error.start]:02x} at offset {offset:,}; "
                f"{best.description}",
                self.through(best.script) if best.script else self.without(),
            ) from None

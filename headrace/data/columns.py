"""Read the rows of a .parquet file, of which only the columns of the text are touched.

Texts may stand in plain, large, viewed or dictionary columns, and inside of structs and lists.
"""

import shlex
from collections.abc import Generator, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from headrace.core.errors import ConfigError
from headrace.core.files import python, shell
from headrace.data.fields import no_field, top
from headrace.data.text_file import TextAndOrigin, TextFile

BATCH_ROWS, BATCH_BYTES = 1024, 16 << 20
"""The most rows of a table that are read together, and about how many bytes of text."""
UNPACK = {"gzip": "gzip -d", "zstd": "zstd -d --rm", "bz2": "bzip2 -d", "xz": "xz -d"}


def read_columns(file: TextFile, compression: str | None) -> Iterator[TextAndOrigin]:
    """Yield the rows of a .parquet file.

    Raises:
        ConfigError: it is compressed as a whole, or lacks a column, or a text of it is not UTF-8.
    """
    if compression:
        raise ConfigError(
            f"{file.name} is compressed as a whole, and parquet is compressed within",
            file.replaced(f"{UNPACK[compression]} {shell(file.path)}", file.path.with_suffix("")),
        )
    with file.path.open("rb") as raw, pq.ParquetFile(raw) as table:
        columns, number = _columns(file, table.schema_arrow), 0
        with closing(_ahead(_batches(table, columns))) as batches:
            for batch in batches:
                texts = _texts(file, batch)
                for text in texts or ():
                    number += 1
                    yield text, f"{file.name}:{number}"
                for row in () if texts else _rows(file, batch, number):
                    number += 1
                    origin = f"{file.name}:{number}"
                    try:
                        yield file.text_of(row, origin, file.without), origin
                    except UnicodeDecodeError as error:
                        raise _not_utf_8(file, number, columns[0], error) from None


def _batches(table: pq.ParquetFile, columns: list[str]) -> Iterator[pa.RecordBatch]:
    """Yield the rows of a table in batches of these columns."""
    for batch in table.iter_batches(columns=columns, batch_size=_batch_rows(table)):
        # A name with dots is a path in another column too.
        yield batch if len(batch.schema.names) == len(columns) else batch.select(columns)


def _ahead(batches: Iterator[pa.RecordBatch]) -> Generator[pa.RecordBatch, None, None]:
    """Yield batches, of which a thread decodes the next one meanwhile, without the GIL."""
    with ThreadPoolExecutor(1) as reader:
        coming = reader.submit(next, batches, None)
        while (batch := coming.result()) is not None:
            coming = reader.submit(next, batches, None)
            yield batch


def _columns(file: TextFile, schema: pa.Schema) -> list[str]:
    """Return the columns that hold the fields of the text, and the number noted beside it.

    Raises:
        ConfigError: one is not there, or two have one name.
    """
    columns = list[str]()
    if (chat := file.reading.chat) is not None:
        columns = [name for name in dict.fromkeys(schema.names) if name in chat.fields]
        if not columns:
            columns = [*schema.names]  # whose names the row's refusal tells
    for key in file.reading.keys:
        column = top(key, schema.names)
        if column is None:
            fields = [*_fields(schema)]
            texts = [name for name, kind in fields if _is_text(kind)]
            names = [name for name, _ in fields]
            raise no_field(key, file.reading, names, texts, file.name, file.without)
        columns += [column] * (column not in columns)
    if file.column is not None and (numbers := top(file.column.key, schema.names)):
        columns += [numbers] * (numbers not in columns)  # its absence is told with the row
    for column in columns:
        if (count := schema.names.count(column)) > 1:
            raise ConfigError(
                f"{file.name} has {count} columns {column!r}; the command numbers the others",
                _numbered(file),
            )
    return columns


def _batch_rows(table: pq.ParquetFile) -> int:
    """Return how many rows are read together, so that long texts do not fill the memory.

    A row is taken as all of its columns: what a group says of one column ends the process where
    that column's metadata are damaged (pyarrow 26.0.1, `RowGroupMetaData.column`).
    """
    most = 1
    for number in range(table.metadata.num_row_groups):
        group = table.metadata.row_group(number)
        most = max(most, group.total_byte_size // max(1, group.num_rows))
    return max(1, min(BATCH_ROWS, BATCH_BYTES // most))


def _texts(file: TextFile, batch: pa.RecordBatch) -> list[str | None] | None:
    """Return the texts of a batch at once; None where its rows must be looked at one by one."""
    if file.column is not None or file.reading.template or not _is_text(batch.schema.types[0]):
        return None
    if batch.schema.names != [file.reading.text_key]:
        return None
    try:
        return batch.column(0).to_pylist()
    except UnicodeDecodeError:
        return None


def _rows(file: TextFile, batch: pa.RecordBatch, before: int) -> list[dict[str, Any]]:
    """Return the rows of a batch.

    Raises:
        ConfigError: a text of it is not UTF-8, which its writer did not check.
    """
    try:
        return batch.to_pylist()
    except UnicodeDecodeError:
        pass
    rows = list[dict[str, Any]]()
    for number in range(len(batch)):
        row, origin = dict[str, Any](), f"{file.name}:{before + number + 1}"
        for name, column in zip(batch.schema.names, batch.columns, strict=True):
            cell = column.slice(number, 1)
            try:
                row[name] = cell.to_pylist()[0]
            except UnicodeDecodeError as error:
                if not (file.reading.replace and _is_text(cell.type)):
                    raise _not_utf_8(file, before + number + 1, name, error) from None
                row[name] = file.decoded(_raw(cell), origin)
        rows.append(row)
    return rows


def _raw(cell: pa.Array) -> bytes:
    """Return the bytes of the one text of an array, which are no UTF-8."""
    plain = cell.dictionary_decode() if isinstance(cell, pa.DictionaryArray) else cell
    large = pa.types.is_large_string(plain.type)
    return plain.cast(pa.large_binary() if large else pa.binary()).to_pylist()[0]


def _not_utf_8(file: TextFile, number: int, column: str, error: UnicodeDecodeError) -> ConfigError:
    return ConfigError(
        f"{file.name}: row {number:,} is not UTF-8 in its column {column!r}: byte "
        f"0x{error.object[error.start]:02x} at offset {error.start:,} of the text; the command "
        "replaces such bytes with U+FFFD",
        _replaced(file, column),
    )


def _numbered(file: TextFile) -> str:
    """Return the command that rewrites a parquet file so that every column has its own name."""
    script = (
        "import pyarrow.parquet as pq, sys; t = pq.ParquetFile(sys.argv[1]).read(); "
        "n = t.column_names; m = [x if x not in n[:i] else f'{x}_{i}' for i, x in enumerate(n)]; "
        "pq.write_table(t.rename_columns(m), sys.argv[2])"
    )
    run = python(script, shell(file.kept()), shell(file.path))
    return file.aside() if file.is_remote else f"{file.aside()} && {run}"


def _replaced(file: TextFile, column: str) -> str:
    """Return the command that rewrites a parquet file with valid text in a column."""
    script = (
        "import pyarrow as pa, pyarrow.parquet as pq, sys; bad, good, name = sys.argv[1:]; "
        "t = pq.read_table(bad); "
        "texts = [x and x.decode(errors='replace') for x in t[name].cast('binary').to_pylist()]; "
        "t = t.set_column(t.column_names.index(name), name, pa.array(texts, 'string')); "
        "pq.write_table(t, good)"
    )
    run = python(script, shell(file.kept()), shell(file.path), shlex.quote(column))
    return file.aside() if file.is_remote else f"{file.aside()} && {run}"


def _fields(fields: Iterable[Any], before: str = "", depth: int = 0) -> Iterator[tuple[str, Any]]:
    """Yield the columns of a table with their types, those inside of others dotted."""
    for field in fields:
        name, kind = before + field.name, field.type
        while pa.types.is_list(kind) or pa.types.is_large_list(kind):
            name, kind = f"{name}.0", kind.value_type
        if pa.types.is_struct(kind) and depth < 4:
            inner = [kind.field(i) for i in range(kind.num_fields)]
            yield from _fields(inner, f"{name}.", depth + 1)
        else:
            yield name, kind


def _is_text(kind: Any) -> bool:
    kind = kind.value_type if pa.types.is_dictionary(kind) else kind
    return pa.types.is_string(kind) or pa.types.is_large_string(kind)

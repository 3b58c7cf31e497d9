"""Tables of texts, as people have them: CSV, TSV, JSON lines, a JSON list, Parquet or Arrow, packed or not."""

from __future__ import annotations

import csv
import io
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path
from typing import Any

from ..shell.reading import BEGINNING, DataError, decoded, parsed, what_else
from ..shell.text import shown
from ..shell.unpacking import MAX_UNPACKED, RATIO, read_unpacked

SUFFIXES = (".csv", ".tsv", ".jsonl", ".ndjson", ".json", ".parquet", ".arrow")

ROWS = 16  # of a Parquet file that are decoded at once: each may be as large as the file

Row = tuple[str, Mapping[str, Any]]  # where it stands, for messages, and its values by the names of the columns


def rows(path: Path, header: Collection[str], quoted: bool = True) -> Iterator[Row]:
    """The rows of the table at `path`; what kind of table it is, is seen from its content.

    header: names of columns; the first row of a CSV or TSV is a header if it has one of them, in upper or lower case.
    Without a header, the columns are named "0", "1" and so on. quoted: whether the fields of a TSV may stand in
    quotation marks; otherwise such marks are a part of the text. Raises DataError, naming the file and the row.
    """
    data = read_unpacked(path)
    kind = what_else(data[:BEGINNING])
    if kind in ("a Parquet file", "an Arrow file"):
        yield from _arrow(path, data, kind)
    elif kind is not None:
        raise DataError(f"{path}: expected a table (CSV, TSV, JSON lines, Parquet or Arrow), got {kind}")
    elif (text := decoded(data, path)).lstrip().startswith("[{"):
        for i, row in enumerate(parsed(f'{{"rows": {text}}}', path, DataError)["rows"], 1):
            if not isinstance(row, dict):
                raise DataError(f"{path}: row {i}: expected an object {{...}}, got {shown(row)}")
            yield f"{path}: row {i}", row
    elif text.lstrip().startswith("{"):
        for i, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"{path}: line {i}", parsed(line, f"{path}: line {i}", DataError)
    else:
        yield from _separated(path, text, {name.casefold() for name in header}, quoted)


def _separated(path: Path, text: str, header: set[str], quoted: bool) -> Iterator[Row]:
    """The rows of a CSV, or of a TSV if the first line has a tab."""
    options: dict[str, Any] = {}
    if "\t" in text[: text.find("\n") if "\n" in text else None]:
        options = {"delimiter": "\t", "quoting": csv.QUOTE_MINIMAL if quoted else csv.QUOTE_NONE}
    reader = csv.reader(io.StringIO(text, newline=""), strict=True, **options)
    names: list[str] | None = None
    try:
        for fields in reader:
            where = f"{path}: line {reader.line_num}"
            if names is None:
                names = [field.strip().casefold() for field in fields]
                if header & set(names):
                    continue
                names = [str(i) for i in range(len(fields))]
            if fields:
                if len(fields) != len(names):
                    raise DataError(f"{where}: expected {len(names)} columns, as in the first line, got {len(fields)}")
                yield where, dict(zip(names, fields, strict=True))
    except csv.Error as error:
        raise DataError(f"{path}: damaged at line {reader.line_num}: {error}") from error


def _arrow(path: Path, data: bytes | bytearray, kind: str) -> Iterator[Row]:
    try:
        import pyarrow
        from pyarrow import ipc, parquet, types
    except ImportError as error:
        raise DataError(f"{path}: {kind}, which needs pyarrow: pip install 'scratchformer[files]'") from error
    source = pyarrow.py_buffer(data)
    limit = max(MAX_UNPACKED, RATIO * len(data))
    too_much = DataError(f"{path}: its rows have more than {limit:,} bytes, far more than text does")

    def is_plain(type_: Any) -> bool:  # the size of a list in a row has no bound
        if types.is_struct(type_):
            return all(is_plain(f.type) for f in type_)
        if types.is_dictionary(type_) or types.is_run_end_encoded(type_):
            return is_plain(type_.value_type)
        return not types.is_nested(type_) and not isinstance(type_, pyarrow.BaseExtensionType)

    try:
        if kind == "a Parquet file":
            file = parquet.ParquetFile(pyarrow.BufferReader(source))
            groups = (file.metadata.row_group(i) for i in range(file.metadata.num_row_groups))
            if sum(group.total_byte_size for group in groups) > limit:
                raise too_much
            batches = file.iter_batches(ROWS, columns=[f.name for f in file.schema_arrow if is_plain(f.type)])
        elif data.startswith(b"ARROW1"):
            reader = ipc.open_file(source)
            batches = map(reader.get_batch, range(reader.num_record_batches))
        else:
            batches = iter(ipc.open_stream(source))
        number = 0
        for batch in batches:
            if batch.nbytes > limit:
                raise too_much
            columns = {
                f.name: column for f, column in zip(batch.schema, batch.columns, strict=True) if is_plain(f.type)
            }
            for values in zip(*columns.values(), strict=True):  # one row in memory, not the batch
                row = {name: value.as_py() for name, value in zip(columns, values, strict=True)}
                number, limit = number + 1, limit - len(repr(row))
                if limit < 0:
                    raise too_much
                yield f"{path}: row {number}", row
    except DataError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError) as error:
        raise DataError(f"{path}: damaged: {' '.join(str(error).split())[:200]}") from error

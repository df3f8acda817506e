"""Tables of records in CSV and Parquet files, read row by row in bounded memory."""

import codecs
import csv
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import IO, Any

from flower_ext.errors import InvalidValue

DELIMITERS = ",;\t|"


@dataclass(frozen=True, kw_only=True)
class RecordFile:
    """A CSV file whose first line names the columns, or a Parquet file (extra ``parquet``).

    Errors show no value of the file. They do not show the first line either, because it is a
    person's record if the file has no line of column names.

    Parameters
    ----------
    path : Path
        A file whose name ends in .parquet is Parquet; any other file is CSV.
    encoding : str
        Encoding of a CSV file. A byte order mark in the file takes precedence. latin-1
        is read as cp1252. If the file is UTF-8 with letters beyond ASCII, every other encoding is
        refused, because it would change these letters.
    """

    path: Path
    encoding: str = "utf-8"

    def column_names(self) -> list[str]:
        """Return the names of the columns; refuse an unreadable file, or two equal names."""
        if self.path.suffix == ".parquet":
            names, form = list(_open_parquet(self.path).schema_arrow.names), "column names"
        else:
            with self._text() as stream:
                names, form = next(self._lines(stream), []), "a first line of column names"
        if not any(names) or len(set(names)) < len(names):
            raise InvalidValue(f"{self.path}: expected {form}, all different")
        return names

    def positions(self, columns: Sequence[str]) -> list[int]:
        """Return the positions of ``columns`` in a row; refuse a column that the file lacks."""
        names = self.column_names()
        if missing := [column for column in columns if column not in names]:
            raise InvalidValue(
                f"{self.path}: no column {', '.join(map(repr, missing))} among the {len(names)} "
                "columns that its first line names; case and spaces of a name must agree"
            )
        return [names.index(column) for column in columns]

    def rows(self) -> Iterator[Sequence[Any]]:
        """Yield the rows: texts of a CSV file, values of a Parquet file; refuse malformed lines."""
        if self.path.suffix == ".parquet":
            for batch in _open_parquet(self.path).iter_batches(batch_size=2**14):
                yield from zip(*(column.to_pylist() for column in batch.columns), strict=True)
            return
        width = len(self.column_names())
        with self._text() as stream:
            lines = self._lines(stream)
            next(lines)
            for number, row in enumerate(lines, 2):
                if len(row) != width:
                    if not row:
                        continue  # an empty line
                    raise InvalidValue(
                        f"{self.path}: row {number} has {len(row)} fields and the first line has "
                        f"{width}; put quotes around fields that contain the delimiter"
                    )
                yield row

    @contextmanager
    def _text(self) -> Iterator[IO[str]]:
        encoding = self.encoding
        try:
            with self.path.open("rb") as stream:
                mark = stream.read(3)
            if mark[:2] in (b"\xff\xfe", b"\xfe\xff"):
                encoding = "utf-16"
            elif mark == b"\xef\xbb\xbf":
                encoding = "utf-8-sig"
            elif codecs.lookup(encoding).name not in ("utf-8", "ascii") and _is_utf8(self.path):
                raise InvalidValue(
                    f"{self.path}: the file is UTF-8, not {encoding}; leave the encoding out"
                )
            if codecs.lookup(encoding).name == "iso8859-1":
                # Files that are called latin-1 are usually cp1252, and browsers read them so too.
                # cp1252 has letters, such as Š, where latin-1 has control characters.
                encoding = "cp1252"
            with self.path.open(encoding=encoding, newline="") as text:
                yield text
        except UnicodeError:
            raise InvalidValue(
                f"{self.path}: some bytes are invalid in the encoding {encoding}; give the file's "
                "encoding, often cp1252 or utf-16-le"
            ) from None
        except LookupError:
            raise InvalidValue(
                f"encoding={self.encoding!r}: expected an encoding that Python knows"
            ) from None
        except csv.Error as error:
            raise InvalidValue(f"{self.path}: not a CSV file: {error}") from None
        except OSError as error:
            raise InvalidValue(f"{self.path}: cannot be read; {error.strerror}") from None

    def _lines(self, stream: IO[str]) -> Iterator[list[str]]:
        """Yield each line's fields, split at the most frequent delimiter of the first line."""
        first = stream.readline()
        stream.seek(0)
        return csv.reader(stream, delimiter=max(DELIMITERS, key=first.count), strict=True)


def _is_utf8(path: Path) -> bool:
    """Return True for a UTF-8 file with characters other than ASCII."""
    try:
        with path.open(encoding="utf-8", newline="") as text:
            # Read the whole file: a byte that is invalid in UTF-8 may come after the first letter
            # beyond ASCII.
            return False in {block.isascii() for block in iter(partial(text.read, 2**20), "")}
    except UnicodeError:
        return False


def _open_parquet(path: Path) -> Any:
    """Open a Parquet file with pyarrow."""
    try:
        from pyarrow import ArrowInvalid, parquet
    except ImportError:
        raise InvalidValue(
            f"{path}: Parquet files need pyarrow: pip install 'flower-ext[parquet]'"
        ) from None
    try:
        return parquet.ParquetFile(path)
    except ArrowInvalid as error:
        raise InvalidValue(f"{path}: not a Parquet file: {error}") from None
    except OSError as error:
        raise InvalidValue(f"{path}: cannot be read; {error.strerror or error}") from None

"""Tables in text files: CSV and its relatives, and JSON lines, plain or compressed with gzip."""

from __future__ import annotations

import gzip
import itertools
import json
import re
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

CSV_SUFFIXES = (".csv", ".tsv", ".txt")
JSON_SUFFIXES = (".jsonl", ".ndjson")
GZIP = ".gz"

SEPARATORS = (",", ";", "\t", "|")
"""Of these, the one that occurs most often in the first line separates the values."""

SAMPLED_LINES = 50
"""How many lines show whether numbers have a decimal comma."""

QUOTED = re.compile(r'"[^"]*"')

MISSING_VALUES = (
    *("", "?", "NA", "N/A", "n/a", "<NA>", "#N/A", "NaN", "nan", "-nan", "-NaN", "null", "NULL", "None"),
    *("#NA", "#N/A N/A", "1.#IND", "1.#QNAN", "-1.#IND", "-1.#QNAN"),
)
"""Cells that count as missing: pandas' list, and the question mark of many public tables."""


def format_suffix(file: Path) -> str:
    """The suffix that says the format, in lower case, without that of a compression."""
    suffixes = [suffix.lower() for suffix in file.suffixes]
    if suffixes[-1:] == [GZIP] and len(suffixes) > 1 and suffixes[-2] in (*CSV_SUFFIXES, *JSON_SUFFIXES):
        return suffixes[-2]
    return suffixes[-1] if suffixes else ""


def read_text_frame(file: Path, text_columns: Sequence[str]) -> pd.DataFrame:
    """The table of a text file; the columns named stay text, so that 007 does not become 7."""
    return _read_json_lines(file) if format_suffix(file) in JSON_SUFFIXES else _read_csv(file, text_columns)


def iterate_text_frames(file: Path, category_columns: Sequence[str], rows: int) -> Iterator[pd.DataFrame]:
    """The table of a text file in blocks of so many rows.

    The categories of a CSV file stay text, so that a block in which all of them look like numbers is read like any
    other; a missing one stays missing.
    """
    import pandas as pd

    if format_suffix(file) in JSON_SUFFIXES:
        records = _iterate_records(file)
        while listed := list(itertools.islice(records, rows)):
            yield pd.DataFrame.from_records(listed)
        return
    with explaining_text_errors():
        names = _read_column_names(file)
        kinds: Any = {name: str for name in category_columns if name in names}
        with pd.read_csv(file, dtype=kinds, chunksize=rows, low_memory=False, **_csv_settings(file)) as blocks:
            for block in blocks:
                _check_row_names(block)
                yield block


def _read_csv(file: Path, text_columns: Sequence[str]) -> pd.DataFrame:
    import pandas as pd

    with explaining_text_errors():
        settings = _csv_settings(file)
        names = _read_column_names(file)
        kinds: Any = {name: str for name in text_columns if name in names}
        # Among names of clients, NA may be Namibia.
        settings["na_values"] = {name: [""] if name in kinds else list(MISSING_VALUES) for name in names}
        frame: pd.DataFrame = pd.read_csv(file, dtype=kinds, low_memory=False, **settings)
    _check_row_names(frame)
    return _drop_decimals(frame, kinds)


def _drop_decimals(frame: pd.DataFrame, text_columns: Iterable[str]) -> pd.DataFrame:
    """Write names of clients such as 2.0 as 2: integers of which one is missing are often saved like that."""
    for name in text_columns:
        known = frame[name].dropna()
        if len(known) and known.str.fullmatch(r"-?\d+\.0").all():
            frame[name] = frame[name].str.removesuffix(".0")
    return frame


def _read_column_names(file: Path) -> list[str]:
    """The names as pandas reads them; a name that appears twice is refused, because pandas would rename the second."""
    import pandas as pd

    settings = _csv_settings(file)
    names = [str(name) for name in pd.read_csv(file, nrows=0, **settings).columns]
    written = pd.read_csv(file, nrows=1, header=None, dtype=str, **{**settings, "na_values": []}).iloc[0]
    repeated = [name for name in written[written.duplicated()] if name]
    if repeated:
        raise ValueError(f"column {repeated[0]!r} appears twice; rename or drop one")
    return names


def _csv_settings(file: Path) -> dict[str, Any]:
    separator, decimal = _detect_separator(file)
    return {
        "sep": separator,
        "decimal": decimal,
        "na_values": list(MISSING_VALUES),
        "keep_default_na": False,
        "skipinitialspace": True,
        "encoding": "utf-8-sig",
    }


@contextmanager
def explaining_text_errors() -> Iterator[None]:
    """Say in one line what is wrong with a text file."""
    import pandas as pd

    try:
        yield
    except pd.errors.EmptyDataError:
        raise ValueError("it is empty: write one line of column names, then one line per row") from None
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text: save the table as CSV in UTF-8") from None
    except pd.errors.ParserError as error:
        reason = str(error).rpartition("C error: ")[2].strip()
        raise ValueError(f"it is no regular CSV ({reason}): give every line as many values as the first") from error
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"it is no intact gzip file ({error}): write it again") from error


def _check_row_names(frame: pd.DataFrame) -> None:
    import pandas as pd

    if len(frame) and not isinstance(frame.index, pd.RangeIndex):
        # Pandas takes values without a column name for row names, which shifts every other value by one column.
        raise ValueError("its lines hold more values than its first line has names: name every column")


def _detect_separator(file: Path) -> tuple[str, str]:
    """The separator of values, and the decimal mark: a comma where values are separated otherwise and none has a point.

    The first line decides, without what is in quotes.
    """
    with _open_text(file) as stream:
        lines = [line for line, _ in zip(stream, range(SAMPLED_LINES), strict=False)]
    header = QUOTED.sub("", next((line for line in lines if line.strip()), ""))
    tab_first = ("\t", *SEPARATORS) if format_suffix(file) == ".tsv" else SEPARATORS
    separator = max(tab_first, key=header.count)
    if separator == ",":
        return separator, "."
    cells = [cell.strip().strip('"') for line in lines[1:] for cell in line.split(separator)]
    has_comma = any(re.fullmatch(r"[+-]?\d+,\d+", cell) for cell in cells)
    has_point = any(re.fullmatch(r"[+-]?\d+\.\d+", cell) for cell in cells)
    return separator, "," if has_comma and not has_point else "."


def _read_json_lines(file: Path) -> pd.DataFrame:
    import pandas as pd

    records = list(_iterate_records(file))
    if not records:
        raise ValueError("it is empty: write one JSON object per line, with the same names in each")
    return pd.DataFrame.from_records(records)


def _iterate_records(file: Path) -> Iterator[dict[str, Any]]:
    try:
        with _open_text(file) as stream:
            for number, line in enumerate(stream, 1):
                if not line.strip():
                    continue
                try:
                    record = json.loads(line)
                except ValueError as error:
                    raise ValueError(f"line {number} is no JSON ({error}): write one object per line") from None
                if not isinstance(record, dict):
                    raise ValueError(f"line {number} is a {type(record).__name__}: write one JSON object per line")
                yield record
    except UnicodeDecodeError:
        raise ValueError("it is not UTF-8 text: save it in UTF-8") from None
    except (gzip.BadGzipFile, zlib.error, EOFError) as error:
        raise ValueError(f"it is no intact gzip file ({error}): write it again") from error


def _open_text(file: Path) -> IO[str]:
    if file.suffix.lower() == GZIP:
        return gzip.open(file, "rt", encoding="utf-8-sig")
    return file.open(encoding="utf-8-sig")

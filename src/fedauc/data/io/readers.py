"""Reading a table from a text, Parquet, Arrow or NumPy file, or from a frame."""

from __future__ import annotations

import difflib
import logging
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from fedauc.data.checks import as_float32, as_inputs, as_labels, name_row, naming_source
from fedauc.data.dataset import ClientColumns, Rows
from fedauc.data.io.memory import index_type
from fedauc.data.io.text_files import CSV_SUFFIXES, JSON_SUFFIXES, format_suffix, read_text_frame
from fedauc.data.names import as_names, enumerate_names, find_client_values
from fedauc.discovery import lookup

if TYPE_CHECKING:
    import pandas as pd

COLUMNAR_SUFFIXES = (".parquet", ".arrow", ".feather")
"""Parquet, and Arrow's own format (also called Feather), as a file or as a stream."""

SUFFIXES = (".csv", *COLUMNAR_SUFFIXES, ".npz", *CSV_SUFFIXES[1:], *JSON_SUFFIXES)
"""The supported formats, recognised by the end of a file's name, in upper or lower case; text may be compressed."""

BLOCK = 1 << 16
"""How many rows of a columnar file are read at once."""

ARROW_MAGIC = b"ARROW1"
"""The first bytes of an Arrow file that is not a stream."""

NPZ_ERRORS = (
    *(OSError, ValueError, EOFError, KeyError, TypeError, RuntimeError, SyntaxError),
    *(zipfile.BadZipFile, zlib.error),
)
"""What numpy raises on a damaged archive, depending on which byte is wrong."""


class Columns(NamedTuple):
    """The roles of columns: an empty `client` or `group` means there is none, empty `features` all other numbers.

    `roster` columns describe clients to schedules, so they are no features unless they are listed there. The columns
    in `ignore` are never features.
    """

    label: str
    client: str
    group: str = ""
    features: tuple[str, ...] = ()
    roster: tuple[str, ...] = ()
    ignore: tuple[str, ...] = ()


def read_table(path: str, columns: Columns) -> tuple[Rows, Columns]:
    """The rows of a file, and the columns with the features listed (for a second file of the same layout).

    Inputs are finite float32 (an .npz file may also hold int32 or int64), labels are zeros and ones; every error names
    the file.
    """
    file = Path(path)
    check_exists(file)
    with naming_file(file):
        if is_npz(file):
            rows, resolved = read_npz(file, columns), columns
        else:
            frame = read_file_frame(file, columns)
            resolved = resolve_columns(frame, columns)
            rows = read_frame(frame, resolved)
        return check_rows(rows, resolved), resolved


def read_file_frame(file: Path, columns: Columns) -> pd.DataFrame:
    """The table of a text, Parquet or Arrow file; client and group names in a text file stay text."""
    with requiring_frames():
        return _read_columnar(file) if is_columnar(file) else read_text_frame(file, (columns.client, columns.group))


def is_npz(file: Path) -> bool:
    """Whether a file's name says that it holds numpy arrays."""
    return file.suffix.lower() == ".npz"


def read_client_columns(path: str, columns: Columns) -> ClientColumns:
    """The value of every roster column for every client; a client whose rows disagree is refused."""
    file = Path(path)
    with naming_file(file):
        return merge_roster_blocks(_iterate_roster_blocks(file, columns), columns)


def merge_roster_blocks(blocks: Iterable[Mapping[str, np.ndarray]], columns: Columns) -> ClientColumns:
    """The same from blocks of rows, each with the client and the roster columns."""
    values = ClientColumns({name: {} for name in columns.roster})
    for block in blocks:
        names, client = enumerate_names(as_names(block[columns.client], "client", len(block[columns.client])))
        for column, known in values.items():
            row_values = find_client_values(client, names, column, block[column])
            for name, value in zip(names.tolist(), row_values.tolist(), strict=True):
                if known.setdefault(name, value) != value:
                    both = f"{column} {known[name]!r} and {value!r}"
                    raise ValueError(f"client {name!r} has {both}; give all rows of a client the same {column}")
    return values


def _iterate_roster_blocks(file: Path, columns: Columns) -> Iterator[dict[str, np.ndarray]]:
    """The client and the roster columns of a file, a block of rows at a time."""
    needed = [columns.client, *columns.roster]
    if is_npz(file):
        with file.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            yield {name: _read_array(arrays, name) for name in needed}
        return
    with requiring_frames():
        frames = iterate_frames(file, needed) if is_columnar(file) else iter([read_file_frame(file, columns)])
        for frame in frames:
            yield {name: _read_column(frame, name) for name in needed}


def check_rows(rows: Rows, columns: Columns) -> Rows:
    """Rows as read from a file, with labels 0 and 1, and inputs in float32 unless they are int32 or int64."""
    inputs = np.asarray(rows.inputs)
    if inputs.dtype not in (np.int32, np.int64):
        inputs = as_float32(inputs, columns.features)
    numbers = np.arange(len(inputs), dtype=index_type(len(inputs)))
    return rows._replace(inputs=inputs, labels=as_labels(rows.labels, len(inputs), columns.label), numbers=numbers)


def check_suffix(path: str) -> None:
    """Refuse a file name that does not end in a supported format."""
    file = Path(path)
    if format_suffix(file) in SUFFIXES:
        return
    _refuse_directory(file)
    raise ValueError(f"path is {path!r}; it must end in {', '.join(SUFFIXES)}: convert the file")


def check_exists(file: Path) -> None:
    """Refuse a file that does not exist, and suggest one with a similar name."""
    _refuse_directory(file)
    if not file.is_file():
        candidates = [path.name for path in file.parent.glob("*") if format_suffix(path) in SUFFIXES]
        similar = difflib.get_close_matches(file.name, candidates, n=1)
        hint = f"did you mean {similar[0]!r}?" if similar else "give the path of a file that exists"
        raise ValueError(f"path is {str(file)!r}, but there is no such file: {hint}")


def _refuse_directory(file: Path) -> None:
    if file.is_dir():
        raise ValueError(f"path is {str(file)!r}; it is a directory: name one file in it")


def naming_file(file: Path) -> AbstractContextManager[None]:
    """Make every ValueError name the file, in one line."""
    return naming_source(f"file {str(file)!r}")


@contextmanager
def requiring_frames() -> Iterator[None]:
    """Turn a missing pandas or pyarrow into a message that says how to install them."""
    try:
        yield
    except ImportError:
        raise ValueError("reading it needs pandas and pyarrow: run pip install pandas pyarrow") from None


# ------------------------------------------------------------------------------------------------------- pandas frames


def check_frame(frame: pd.DataFrame) -> None:
    """Refuse a frame without rows, and names of columns that are no text or appear twice."""
    unnamed = [name for name in frame.columns if not isinstance(name, str)]
    if unnamed:
        raise ValueError(f"column {unnamed[0]!r} has no text for a name: use frame.columns = frame.columns.astype(str)")
    if not frame.columns.is_unique:
        repeated = frame.columns[frame.columns.duplicated()][0]
        raise ValueError(f"column {repeated!r} appears twice; rename or drop one")
    if len(frame) == 0:
        # An empty column has no type, so a later check would complain about that instead.
        raise ValueError("the table has no rows; give at least one positive and one negative")


def resolve_columns(frame: pd.DataFrame, columns: Columns) -> Columns:
    """The same columns with the features listed; refuses columns that are missing or features that are not numeric."""
    from pandas.api.types import is_numeric_dtype

    check_frame(frame)
    roles = (columns.label, columns.client, columns.group, *columns.roster)
    for name in (*roles, *columns.features):
        if name:
            lookup("column", name, dict.fromkeys(frame.columns, True))
    numeric = [name for name in frame.columns if is_numeric_dtype(frame[name].dtype)]
    for name in columns.features:
        if name not in numeric:
            raise ValueError(f"feature column {name!r} is {frame[name].dtype}, not numbers; encode it or leave it out")
    if columns.features:
        return columns
    features = tuple(name for name in numeric if name not in roles)
    ignored = [str(name) for name in frame.columns if name not in (*numeric, *roles)]
    if ignored:
        logging.getLogger("fedauc").warning(
            "columns left out because they are not numbers: %s; fedauc.Table encodes them", ", ".join(ignored)
        )
    if not features:
        raise ValueError(f"no numeric column is left for features among {list(map(str, frame.columns))}; encode some")
    return columns._replace(features=features)


def read_frame(frame: pd.DataFrame, columns: Columns) -> Rows:
    """The rows of a frame; `columns` must have been resolved. All-integer features become float32."""
    features = frame[list(columns.features)]
    double = any(str(dtype).lower() == "float64" for dtype in features.dtypes)
    values = features.to_numpy(dtype=np.float64 if double else np.float32, na_value=np.nan)
    return Rows(
        as_inputs(values, columns.features).numpy(),
        _read_column(frame, columns.label),
        _read_column(frame, columns.client) if columns.client else None,
        _read_column(frame, columns.group) if columns.group else None,
    )


def _read_column(frame: pd.DataFrame, name: str) -> np.ndarray:
    missing = np.flatnonzero(frame[name].isna())
    if len(missing):
        rows = f"{len(missing)} rows, the first {name_row(missing[0])}"
        raise ValueError(f"column {name!r} is missing in {rows}; drop or fill them")
    values: np.ndarray = frame[name].to_numpy()
    return values


# --------------------------------------------------------------------------------------------------- Parquet and Arrow


def is_columnar(file: Path) -> bool:
    """Whether a file's name says that it is stored by column."""
    return file.suffix.lower() in COLUMNAR_SUFFIXES


def _read_columnar(file: Path) -> pd.DataFrame:
    import pandas as pd

    blocks = list(iterate_frames(file))
    return pd.concat(blocks, ignore_index=True) if len(blocks) > 1 else blocks[0]


def columnar_size(file: Path) -> tuple[int, int]:
    """The number of rows and columns that a Parquet or Arrow file declares."""
    import pyarrow.parquet as pq

    with _explaining_damage(file):
        if _is_parquet(file):
            rows = int(pq.read_metadata(file).num_rows)
        else:
            rows = sum(batch.num_rows for batch in _arrow_batches(file))
        return rows, len(_read_schema(file).names)


def iterate_frames(file: Path, columns: Sequence[str] = ()) -> Iterator[pd.DataFrame]:
    """The rows of a file in blocks, with all columns or those named; an empty file yields one empty frame."""
    import pyarrow as pa

    with _explaining_damage(file):
        schema, pending, rows = _read_schema(file), list[Any](), 0
        # Arrow's reader can select columns too, but then it copies what it would otherwise map.
        batches = _parquet_batches(file, columns) if _is_parquet(file) else _arrow_batches(file)
        for batch in batches:
            selected = batch.select(list(columns)) if columns else batch
            # Arrow trusts a file: an offset outside its memory would end the process when it is read.
            selected.validate(full=True)
            pending.append(selected)
            rows += selected.num_rows
            if rows >= BLOCK:
                # Making a frame takes milliseconds whatever its size, and a file may have thousands of small batches.
                yield pa.Table.from_batches(pending).to_pandas(date_as_object=False)
                schema, pending, rows = None, [], 0
        if pending:
            yield pa.Table.from_batches(pending).to_pandas(date_as_object=False)
        elif schema is not None:
            yield schema.empty_table().to_pandas()


def _read_schema(file: Path) -> Any:
    import pyarrow.parquet as pq

    if _is_parquet(file):
        return pq.read_schema(file)
    with _open_arrow(file) as reader:
        return reader.schema


def _parquet_batches(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # Without reading ahead, a batch takes only its memory and not that of a row group of a million rows.
    with pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True) as parquet:
        yield from parquet.iter_batches(BLOCK, columns=list(columns) or None)


def _arrow_batches(file: Path) -> Iterator[Any]:
    with _open_arrow(file) as reader:
        indexed = hasattr(reader, "num_record_batches")
        batches = (reader.get_batch(index) for index in range(reader.num_record_batches)) if indexed else reader
        for batch in batches:
            for start in range(0, batch.num_rows, BLOCK):
                yield batch.slice(start, BLOCK)


@contextmanager
def _open_arrow(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc

    with file.open("rb") as stream:
        open_reader = ipc.open_file if stream.read(len(ARROW_MAGIC)) == ARROW_MAGIC else ipc.open_stream
    with pa.memory_map(str(file)) as source, open_reader(source) as reader:
        yield reader


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


@contextmanager
def _explaining_damage(file: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise
    # A damaged file fails with a dozen unrelated errors, depending on which byte is wrong.
    except Exception as error:
        kind = "Parquet" if _is_parquet(file) else "Arrow"
        raise ValueError(f"it is damaged or no {kind} file ({error}): write it again") from error


# --------------------------------------------------------------------------------------------------------------- NumPy


def read_npz(file: Path, columns: Columns) -> Rows:
    """The arrays of a file: inputs `x`, and those that `columns` names."""
    if columns.features:
        raise ValueError(f"features is {columns.features}; an .npz file has no column names: leave features empty")
    if not zipfile.is_zipfile(file):
        raise ValueError("it is no .npz archive: write it with numpy.savez")
    # The file is opened here because numpy leaves it open when the archive is damaged.
    with file.open("rb") as stream:
        try:
            arrays: np.lib.npyio.NpzFile = np.load(stream, allow_pickle=False)
        except NPZ_ERRORS as error:
            raise ValueError(f"it is a damaged .npz archive ({error}): write it again with numpy.savez") from error
        inputs = as_inputs(_read_array(arrays, "x")).numpy()
        client = _read_array(arrays, columns.client) if columns.client else None
        group_name = columns.group or ("group" if "group" in arrays.files else "")
        group = _read_array(arrays, group_name) if group_name else None
        return Rows(inputs, _read_array(arrays, columns.label), client, group)


def _read_array(arrays: np.lib.npyio.NpzFile, name: str) -> np.ndarray:
    lookup("array", name, dict.fromkeys(arrays.files, True))
    try:
        array: np.ndarray = arrays[name]
    except NPZ_ERRORS as error:
        if "allow_pickle" in str(error):
            raise ValueError(f"array {name!r} holds Python objects; save it as numbers or with dtype=str") from None
        raise ValueError(f"array {name!r} is damaged ({error}): write it again with numpy.savez") from error
    return array

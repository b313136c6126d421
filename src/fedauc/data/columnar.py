"""Tables stored by column, in Arrow and Parquet files: read whole, or a few rows at a time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd

SUFFIXES = (".parquet", ".arrow", ".feather")
"""Parquet, and Arrow's own format (Feather is its other name), as a file or as a stream."""

BLOCK = 1 << 16
"""How many rows are read at once."""

MAGIC = b"ARROW1"
"""How an Arrow file begins that is no stream."""


def is_columnar(file: Path) -> bool:
    """Whether a file's name says that it is stored by column."""
    return file.suffix.lower() in SUFFIXES


def frame(file: Path) -> pd.DataFrame:
    """All rows of a file."""
    import pandas as pd

    blocks = list(frames(file))
    return pd.concat(blocks, ignore_index=True) if len(blocks) > 1 else blocks[0]


def frames(file: Path, columns: Sequence[str] = ()) -> Iterator[pd.DataFrame]:
    """The rows of a file in blocks, one of them empty if there are none; all columns or those named."""
    with _damage(file):
        schema, pending, rows = _schema(file), list[Any](), 0
        for piece in _batches(file, columns):
            batch = piece.select(list(columns)) if columns else piece
            # Arrow trusts a file: what points outside its memory would end the process when it is read.
            batch.validate(full=True)
            pending.append(batch)
            rows += batch.num_rows
            if rows >= BLOCK:
                # A frame takes milliseconds to make, whatever it holds, and a file may be in thousands of small pieces.
                yield _joined(pending)
                schema, pending, rows = None, [], 0
        if pending or schema is not None:
            yield _joined(pending) if pending else schema.empty_table().to_pandas()


def _joined(batches: Sequence[Any]) -> pd.DataFrame:
    import pyarrow as pa

    made: pd.DataFrame = pa.Table.from_batches(batches).to_pandas()
    return made


def size(file: Path) -> tuple[int, int]:
    """How many rows and columns a file has, by its own account."""
    with _damage(file):
        return _count(file), len(_schema(file).names)


def _schema(file: Path) -> Any:
    import pyarrow.parquet as pq

    if _is_parquet(file):
        return pq.read_schema(file)
    with _reader(file) as reader:
        return reader.schema


def _count(file: Path) -> int:
    import pyarrow.parquet as pq

    if _is_parquet(file):
        return int(pq.read_metadata(file).num_rows)
    return sum(batch.num_rows for batch in _arrow(file))


def _batches(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    # Arrow's reader can choose columns too, but then copies what it would otherwise map.
    return _parquet(file, columns) if _is_parquet(file) else _arrow(file)


def _parquet(file: Path, columns: Sequence[str]) -> Iterator[Any]:
    import pyarrow.parquet as pq

    # Without buffers ahead, a batch takes its own memory and not that of a group of a million rows.
    with pq.ParquetFile(file, pre_buffer=False, page_checksum_verification=True) as parquet:
        yield from parquet.iter_batches(BLOCK, columns=list(columns) or None)


def _arrow(file: Path) -> Iterator[Any]:
    with _reader(file) as reader:
        whole = hasattr(reader, "num_record_batches")
        batches = (reader.get_batch(place) for place in range(reader.num_record_batches)) if whole else reader
        for batch in batches:
            for start in range(0, batch.num_rows, BLOCK):
                yield batch.slice(start, BLOCK)


@contextmanager
def _reader(file: Path) -> Iterator[Any]:
    import pyarrow as pa
    from pyarrow import ipc

    with file.open("rb") as stream:
        kind = ipc.open_file if stream.read(len(MAGIC)) == MAGIC else ipc.open_stream
    with pa.memory_map(str(file)) as source, kind(source) as reader:
        yield reader


def _is_parquet(file: Path) -> bool:
    return file.suffix.lower() == ".parquet"


@contextmanager
def _damage(file: Path) -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise
    # A damaged file fails with a dozen unrelated errors, depending on which byte is wrong.
    except Exception as error:
        kind = "Parquet" if _is_parquet(file) else "Arrow"
        raise ValueError(f"it is damaged or no {kind} file ({error}): write it again") from error

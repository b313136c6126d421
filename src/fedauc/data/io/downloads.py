"""Downloading a published file: resumed after a broken connection, and checked before it gets its name."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from fedauc.data.io.stored import CHUNK, File, Source, checksum_mismatch
from fedauc.locks import hold_lock

if TYPE_CHECKING:
    from email.message import Message
    from http.client import HTTPResponse

Progress = Callable[[int, int | None], None]
"""Called with the bytes received so far and the expected total, None where the server does not say."""

ContentCheck = Callable[[Path], None]
"""Raises ValueError where a file without a published checksum cannot be the right one."""

ATTEMPTS = 3
"""How many connections may break before a download gives up."""

TIMEOUT = 60.0
"""Seconds without an answer before a connection counts as broken."""


def download_file(
    source: Source,
    folder: Path,
    progress: Progress = lambda received, total: None,
    check_content: ContentCheck = lambda path: None,
) -> Path:
    """Download a file into a folder. A broken connection leaves a partial file, which the next call continues."""
    if not source.url.startswith(("http://", "https://")):
        raise ValueError(f"{source.name} cannot be fetched: get it by hand, {source.page}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    part = target.with_name(f".{target.name}.part")
    busy = f"{target} is being fetched by another process: wait until it has ended"
    with hold_lock(part.with_name(f"{part.name}.lock"), busy):
        _receive_with_retries(source, part, progress)
        mismatch = checksum_mismatch(File(part, source.checksum))
        if not source.checksum:
            try:
                check_content(part)
            except ValueError as error:
                mismatch = str(error).replace(str(part), "it")
        if mismatch:
            _delete_part(part)
            by_hand = f"try again later, or get it by hand, {source.page}"
            raise ValueError(f"{source.url} sent another file than {source.name}: {mismatch}; {by_hand}")
        part.replace(target)
        _tag_path(part).unlink(missing_ok=True)
    return target


def _receive_with_retries(source: Source, part: Path, progress: Progress) -> None:
    # Imported here because they are slow to import and most commands download nothing.
    from http.client import HTTPException
    from urllib.error import HTTPError, URLError

    for attempts_left in reversed(range(ATTEMPTS)):
        try:
            return _receive_rest(source, part, progress)
        except HTTPError as error:
            with error:
                answer = f"{source.url} answered {error.code} {error.reason}"
            raise ValueError(f"{answer}: get {source.name} by hand, {source.page}") from error
        except (ConnectionError, TimeoutError, HTTPException, URLError) as error:
            if attempts_left:
                continue
            reason = getattr(error, "reason", error)
            received = part.stat().st_size if part.exists() else 0
            if received:
                message = f"broke off after {received} bytes ({reason}): run it again to go on from there"
            else:
                by_hand = f"check the network, or get {source.name} by hand, {source.page}"
                message = f"cannot be reached ({reason}): {by_hand}"
            raise ValueError(f"{source.url} {message}") from error
    return None


def _receive_rest(source: Source, part: Path, progress: Progress) -> None:
    """Receive what is missing from a partial file; raises a connection error where the connection breaks."""
    from http import HTTPStatus
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    tag = _tag_path(part).read_text() if _tag_path(part).exists() else ""
    headers, received = {"User-Agent": "fedauc"}, 0
    # Without a checksum or a tag, a change of the file since the earlier attempt would go unnoticed.
    if part.exists() and (source.checksum or tag) and (received := part.stat().st_size):
        headers |= {"Range": f"bytes={received}-"} | ({"If-Range": tag} if tag else {})
    try:
        answer = urlopen(Request(source.url, headers=headers), timeout=TIMEOUT)
    except HTTPError as error:
        if error.code != HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        with error:
            complete = error.headers.get("Content-Range") == f"bytes */{received}"
            same_file = bool(source.checksum) or _version_tag(error.headers) == tag
        if not (complete and same_file):
            _delete_part(part)
            raise ConnectionError("the partial file is not the beginning of the file") from error
        return
    with answer:
        continues = answer.status == HTTPStatus.PARTIAL_CONTENT
        begins_where_part_ends = answer.headers.get("Content-Range", "").startswith(f"bytes {received}-")
        same_version = not tag or _version_tag(answer.headers) == tag
        if continues and not (begins_where_part_ends and same_version):
            _delete_part(part)
            raise ConnectionError("the server sent another part of the file, or of another file")
        total = _expected_size(source, answer)
        if not continues:
            # Deleted before the tag changes: a partial file must never be next to the tag of another file.
            _delete_part(part)
            received = 0
        _tag_path(part).write_text(_version_tag(answer.headers))
        with part.open("ab" if received else "wb") as stream:
            while chunk := answer.read(CHUNK):
                stream.write(chunk)
                received += len(chunk)
                progress(received, total)
    if total is not None and received != total:
        raise ConnectionError(f"{total - received} bytes are missing")


def _expected_size(source: Source, answer: HTTPResponse) -> int | None:
    """The size of the file; None where the server does not say but the end of the file is recognised otherwise."""
    complete = answer.headers.get("Content-Range", "").rpartition("/")[2]
    length = answer.headers.get("Content-Length")
    if complete.isdigit():
        return int(complete)
    if length and not complete:
        return int(length)
    if not source.checksum and not answer.chunked:
        unknown = f"{source.url} does not say how long it is, so that a broken connection would not show"
        raise ValueError(f"{unknown}: get {source.name} by hand, {source.page}")
    return None


def _version_tag(headers: Message) -> str:
    """What identifies this version of the file. A weak ETag does not: different bytes may share it."""
    tag = headers.get("ETag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified") or ""


def _tag_path(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")


def _delete_part(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag_path(part).unlink(missing_ok=True)

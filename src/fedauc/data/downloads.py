"""Fetching a published file: resumed after a broken connection, checked before it gets its name."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from email.message import Message
from pathlib import Path

from fedauc.data.sources import CHUNK, File, Source, difference
from fedauc.locks import locked

Progress = Callable[[int, int | None], None]
"""Told the bytes so far, and how many there will be where the server says."""

Look = Callable[[Path], None]
"""Raises ValueError where a file without a published checksum cannot be the right one."""

TRIES = 3
"""Connections that may break before fetching gives up."""

PATIENCE = 60.0
"""Seconds without an answer before a connection counts as broken."""

BROKEN = (ConnectionError, TimeoutError, http.client.HTTPException, urllib.error.URLError)
"""What a connection that breaks raises. A server's refusal (HTTPError) is caught before."""


def fetch(
    source: Source, folder: Path, progress: Progress = lambda done, total: None, looks_right: Look = lambda path: None
) -> Path:
    """Download a file into a folder. What a broken connection left is kept, and the next call goes on from there."""
    if not source.url.startswith(("http://", "https://")):
        raise ValueError(f"{source.name} cannot be fetched: get it by hand, {source.page}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    part = target.with_name(f".{target.name}.part")
    busy = f"{target} is being fetched by another process: wait until it has ended"
    with locked(part.with_name(f"{part.name}.lock"), busy):
        _persist(source, part, progress)
        if wrong := _wrong(source, part, looks_right):
            _drop(part)
            by_hand = f"try again later, or get it by hand, {source.page}"
            raise ValueError(f"{source.url} sent another file than {source.name}: {wrong}; {by_hand}")
        part.replace(target)
        _tag(part).unlink(missing_ok=True)
    return target


def _wrong(source: Source, part: Path, looks_right: Look) -> str:
    if source.checksum:
        return difference(File(part, source.checksum))
    try:
        looks_right(part)
    except ValueError as error:
        return str(error).replace(str(part), "it")
    return ""


def _persist(source: Source, part: Path, progress: Progress) -> None:
    for left in reversed(range(TRIES)):
        try:
            return _transfer(source, part, progress)
        except urllib.error.HTTPError as error:
            with error:
                answer = f"{source.url} answered {error.code} {error.reason}"
            raise ValueError(f"{answer}: get {source.name} by hand, {source.page}") from error
        except BROKEN as error:
            if not left:
                raise _broken(source, part, getattr(error, "reason", error)) from error
    return None


def _broken(source: Source, part: Path, reason: object) -> ValueError:
    done = part.stat().st_size if part.exists() else 0
    if not done:
        by_hand = f"check the network, or get {source.name} by hand, {source.page}"
        return ValueError(f"{source.url} cannot be reached ({reason}): {by_hand}")
    return ValueError(f"{source.url} broke off after {done} bytes ({reason}): run it again to go on from there")


def _transfer(source: Source, part: Path, progress: Progress) -> None:
    done = _kept(source, part)
    try:
        answer = urllib.request.urlopen(_request(source, part, done), timeout=PATIENCE)
    except urllib.error.HTTPError as error:
        if error.code != http.client.REQUESTED_RANGE_NOT_SATISFIABLE:
            raise
        with error:
            whole = error.headers.get("Content-Range") == f"bytes */{done}"
            same = bool(source.checksum) or _name(error.headers) == _known(part)
        if not (whole and same):
            _drop(part)
            raise ConnectionError("what is kept is not the beginning of the file") from error
        return
    with answer:
        partial = answer.status == http.client.PARTIAL_CONTENT
        if partial and not _goes_on(answer.headers, done, _known(part)):
            _drop(part)
            raise ConnectionError("the server sent another part of the file, or of another file")
        total = _total(source, answer)
        if not partial:
            # Before the tag changes: a part must never lie beside the tag of another file.
            _drop(part)
            done = 0
        _tag(part).write_text(_name(answer.headers))
        with part.open("ab" if done else "wb") as stream:
            while block := answer.read(CHUNK):
                stream.write(block)
                done += len(block)
                progress(done, total)
    if total is not None and done != total:
        raise ConnectionError(f"{total - done} bytes are missing")


def _goes_on(headers: Message, done: int, tag: str) -> bool:
    """Whether a part of a file begins where the kept part ends, and both are of the same file."""
    return headers.get("Content-Range", "").startswith(f"bytes {done}-") and (not tag or _name(headers) == tag)


def _total(source: Source, answer: http.client.HTTPResponse) -> int | None:
    """How long the file is; nothing where the server does not say and the end of the file shows by other means."""
    complete = answer.headers.get("Content-Range", "").rpartition("/")[2]
    length = answer.headers.get("Content-Length")
    if complete.isdigit():
        return int(complete)
    if length and not complete:
        return int(length)
    if not source.checksum and not answer.chunked:
        unsure = f"{source.url} does not say how long it is, so that a broken connection would not show"
        raise ValueError(f"{unsure}: get {source.name} by hand, {source.page}")
    return None


def _kept(source: Source, part: Path) -> int:
    """How much of an earlier attempt can be kept: nothing, where nobody could tell that the file has changed since."""
    if not part.exists() or not (source.checksum or _known(part)):
        return 0
    return part.stat().st_size


def _request(source: Source, part: Path, done: int) -> urllib.request.Request:
    headers = {"User-Agent": "fedauc"}
    if done:
        headers["Range"] = f"bytes={done}-"
        if tag := _known(part):
            headers["If-Range"] = tag
    return urllib.request.Request(source.url, headers=headers)


def _name(headers: Message) -> str:
    """What tells a file from others at the same address. A weak tag does not: other bytes may have it, too."""
    tag = headers.get("ETag") or ""
    return tag if tag and not tag.startswith("W/") else headers.get("Last-Modified") or ""


def _known(part: Path) -> str:
    return _tag(part).read_text() if _tag(part).exists() else ""


def _tag(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")


def _drop(part: Path) -> None:
    part.unlink(missing_ok=True)
    _tag(part).unlink(missing_ok=True)

"""Fetching a published file: resumed after a broken connection, checked before it gets its name."""

from __future__ import annotations

import http.client
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

from fedauc.data.sources import CHUNK, File, Source, check

Progress = Callable[[int, int | None], None]
"""Told the bytes so far, and how many there will be where the server says."""

TRIES = 3
"""Connections that may break before fetching gives up."""

PATIENCE = 60.0
"""Seconds without an answer before a connection counts as broken."""

BROKEN = (ConnectionError, TimeoutError, http.client.HTTPException, urllib.error.URLError)
"""What a connection that breaks raises. A server's refusal (HTTPError) is caught before."""


def fetch(source: Source, folder: Path, progress: Progress = lambda done, total: None) -> Path:
    """Download a file into a folder. What a broken connection left is kept, and the next call goes on from there."""
    if not source.url.startswith(("http://", "https://")):
        raise ValueError(f"{source.name} cannot be fetched: get it by hand, {source.page}")
    folder.mkdir(parents=True, exist_ok=True)
    target = folder / source.name
    part = target.with_name(f".{target.name}.part")
    _persist(source, part, progress)
    try:
        check(File(part, source.checksum))
    except ValueError as error:
        part.unlink()
        raise ValueError(f"{source.url} sent another file than {source.name}: {error}") from error
    part.replace(target)
    _tag(part).unlink(missing_ok=True)
    return target


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
        if not whole:
            part.unlink()
            raise ConnectionError("what is kept is longer than the file") from error
        return
    with answer:
        done = done if answer.status == http.client.PARTIAL_CONTENT else 0
        _tag(part).write_text(answer.headers.get("ETag") or answer.headers.get("Last-Modified") or "")
        length = answer.headers.get("Content-Length")
        total = done + int(length) if length else None
        with part.open("ab" if done else "wb") as stream:
            while block := answer.read(CHUNK):
                stream.write(block)
                done += len(block)
                progress(done, total)
    if total is not None and done < total:
        raise ConnectionError(f"{total - done} bytes are missing")


def _kept(source: Source, part: Path) -> int:
    """How much of an earlier attempt can be kept: nothing, where nobody could tell that the file has changed since."""
    if not part.exists() or not (source.checksum or (_tag(part).exists() and _tag(part).read_text())):
        return 0
    return part.stat().st_size


def _request(source: Source, part: Path, done: int) -> urllib.request.Request:
    headers = {"User-Agent": "fedauc"}
    if done:
        headers["Range"] = f"bytes={done}-"
        tag = _tag(part).read_text() if _tag(part).exists() else ""
        # A weak tag may not stand here; the server would send the whole file.
        if tag:
            headers["If-Range"] = tag
    return urllib.request.Request(source.url, headers=headers)


def _tag(part: Path) -> Path:
    return part.with_name(f"{part.name}.tag")

"""Downloads over a real connection to a local server: complete, resumed, broken, changed and wrong files."""

from __future__ import annotations

import hashlib
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from fedauc.data.io import downloads
from fedauc.data.io.downloads import ATTEMPTS, download_file
from fedauc.data.io.stored import CHUNK, Source

CONTENT = bytes(range(256)) * (3 * CHUNK // 256 + 1)
"""A little more than three chunks."""

MD5 = f"md5:{hashlib.md5(CONTENT).hexdigest()}"


class Server:
    """Serves one file, as badly as a test asks."""

    def __init__(self) -> None:
        self.content = CONTENT
        self.tag: str | None = '"first"'
        self.ranges = True
        self.break_after: int | None = None
        """Bytes of an answer after which the connection closes."""
        self.breaks = 0
        """How many answers are broken off."""
        self.asked: list[str | None] = []
        """The Range header of every request."""
        self.heeds_if_range = True
        self.shift = 0
        """How many bytes too early a part begins."""
        self.tells_range = True
        self.tells_length = True
        self.go_on = threading.Event()
        """An answer that is broken off waits for it before the connection closes."""
        self.go_on.set()
        self.port = 0

    def source(self, checksum: str = MD5, path: str = "/file.bin") -> Source:
        return Source("file.bin", f"http://127.0.0.1:{self.port}{path}", checksum, "https://example.org/page")

    def answer_request(self, request: BaseHTTPRequestHandler) -> None:
        asked = request.headers.get("Range")
        self.asked.append(asked)
        if request.path != "/file.bin":
            request.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.ranges else 0
        expected = request.headers.get("If-Range")
        if expected and expected != self.tag and self.heeds_if_range:
            start = 0
        if start >= len(self.content):
            request.send_response(416)
            request.send_header("Content-Range", f"bytes */{len(self.content)}")
            if self.tag:
                request.send_header("ETag", self.tag)
            request.end_headers()
            return
        self.send_content(request, start - self.shift if start else 0)

    def send_content(self, request: BaseHTTPRequestHandler, start: int) -> None:
        request.send_response(206 if start else 200)
        if self.tells_length:
            request.send_header("Content-Length", str(len(self.content) - start))
        if start and self.tells_range:
            request.send_header("Content-Range", f"bytes {start}-{len(self.content) - 1}/{len(self.content)}")
        if self.tag:
            request.send_header("ETag", self.tag)
        request.end_headers()
        body = self.content[start:]
        if self.breaks:
            self.breaks -= 1
            body = body[: self.break_after]
            request.wfile.write(body)
            self.go_on.wait()
            body = b""
        request.wfile.write(body)
        request.close_connection = True


@pytest.fixture
def server() -> Iterator[Server]:
    server = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            server.answer_request(self)

        def log_message(self, format: str, *args: object) -> None:
            """Quietly."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        server.port = http.server_address[1]
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server
        http.shutdown()
        thread.join()


def hidden_files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.name.startswith("."))


def test_a_file_arrives_completely_and_progress_is_reported(server: Server, tmp_path: Path) -> None:
    reports: list[tuple[int, int | None]] = []
    path = download_file(server.source(), tmp_path / "new", lambda received, total: reports.append((received, total)))
    assert path.read_bytes() == CONTENT
    assert path.name == "file.bin"
    assert reports[-1] == (len(CONTENT), len(CONTENT))
    assert [received for received, _ in reports] == sorted({received for received, _ in reports})
    assert hidden_files(tmp_path / "new") == []


def test_a_broken_connection_is_taken_up_where_it_broke(server: Server, tmp_path: Path) -> None:
    server.break_after, server.breaks = CHUNK, 1
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, f"bytes={CHUNK}-"]


def test_what_a_failed_fetch_left_is_used_by_the_next(server: Server, tmp_path: Path) -> None:
    server.break_after, server.breaks = 1000, ATTEMPTS
    with pytest.raises(
        ValueError, match=rf"broke off after {1000 * ATTEMPTS} bytes .*run it again to go on from there"
    ):
        download_file(server.source(), tmp_path)
    assert not (tmp_path / "file.bin").exists()
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT
    assert server.asked[-1] == f"bytes={1000 * ATTEMPTS}-"


def test_a_server_without_ranges_sends_it_all_again(server: Server, tmp_path: Path) -> None:
    server.ranges, server.break_after, server.breaks = False, 1000, 1
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-"]


@pytest.mark.parametrize("heeds_if_range", [True, False])
@pytest.mark.parametrize("checksum", [MD5, ""])
def test_a_file_that_changed_meanwhile_is_not_mixed(
    server: Server, tmp_path: Path, checksum: str, heeds_if_range: bool
) -> None:
    server.content, server.break_after, server.breaks = b"x" * 5000, 1000, ATTEMPTS
    with pytest.raises(ValueError, match="broke off"):
        download_file(server.source(checksum), tmp_path)
    server.content, server.tag, server.heeds_if_range = CONTENT, '"second"', heeds_if_range
    assert download_file(server.source(checksum), tmp_path).read_bytes() == CONTENT


@pytest.mark.parametrize(("shift", "tells_range"), [(1, True), (0, False)])
def test_a_part_that_does_not_go_on_is_not_appended(
    server: Server, tmp_path: Path, shift: int, tells_range: bool
) -> None:
    server.break_after, server.breaks, server.shift, server.tells_range = 1000, 1, shift, tells_range
    assert download_file(server.source(""), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, "bytes=1000-", None]


def test_a_partial_file_as_long_as_the_file_but_of_another_version_is_deleted(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(CONTENT[::-1])
    (tmp_path / ".file.bin.part.tag").write_text('"other"')
    server.heeds_if_range = False
    assert download_file(server.source(""), tmp_path).read_bytes() == CONTENT


def test_a_weak_tag_keeps_nothing_without_a_checksum(server: Server, tmp_path: Path) -> None:
    server.tag, server.break_after, server.breaks = 'W/"same meaning, other bytes"', 1000, 1
    assert download_file(server.source(""), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, None]


def test_an_answer_of_unknown_length_needs_a_checksum(server: Server, tmp_path: Path) -> None:
    server.tells_length = False
    with pytest.raises(ValueError, match=r"does not say how long it is.*: get file\.bin by hand, https://example\.org"):
        download_file(server.source(""), tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT


PROGRAM = """
import sys
from pathlib import Path
from fedauc.data.io.downloads import download_file
from fedauc.data.io.stored import Source
download_file(Source("file.bin", sys.argv[1], "", ""), Path(sys.argv[2]))
"""


def test_one_process_at_a_time_and_a_killed_one_is_not_waited_for(server: Server, tmp_path: Path) -> None:
    server.break_after, server.breaks = CHUNK, 1
    server.go_on.clear()
    source = server.source("")
    with subprocess.Popen([sys.executable, "-c", PROGRAM, source.url, str(tmp_path)]) as process:
        try:
            wait_until(lambda: bool(server.asked), process)
            with pytest.raises(ValueError, match=r"file\.bin is being fetched by another process: wait until it has"):
                download_file(source, tmp_path)
        finally:
            process.kill()
    server.go_on.set()
    assert ".file.bin.part.lock" in hidden_files(tmp_path)
    assert download_file(source, tmp_path).read_bytes() == CONTENT
    assert hidden_files(tmp_path) == []


def wait_until(ready: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    """Wait for something that a process does; importing the library takes it seconds."""
    end = time.monotonic() + 60
    while not ready():
        assert process.poll() is None
        assert time.monotonic() < end
        time.sleep(0.01)


def test_what_cannot_be_the_file_never_gets_its_name(server: Server, tmp_path: Path) -> None:
    def refuse(path: Path) -> None:
        assert path.read_bytes() == server.content
        raise ValueError(f"{path} is a web page")

    server.content = b"<html>please log in</html>"
    with pytest.raises(
        ValueError, match=r"sent another file than file\.bin: it is a web page; try again later, or get"
    ):
        download_file(server.source(""), tmp_path, check_content=refuse)
    assert list(tmp_path.iterdir()) == []


def test_without_checksum_and_tag_a_download_starts_again(server: Server, tmp_path: Path) -> None:
    server.tag, server.break_after, server.breaks = None, 1000, 1
    assert download_file(server.source(""), tmp_path).read_bytes() == CONTENT
    assert server.asked == [None, None]


def test_a_wrong_file_is_named_and_thrown_away(server: Server, tmp_path: Path) -> None:
    server.content = b"<html>try later</html>"
    expected = (
        r"/file\.bin sent another file than file\.bin: its md5:.* is the published one; try again later, or get it by"
    )
    with pytest.raises(ValueError, match=expected) as caught:
        download_file(server.source(), tmp_path)
    # What was fetched is gone already: there is nothing that a reader could delete.
    assert "delete" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []
    server.content = CONTENT
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT


def test_a_complete_part_needs_no_more_bytes(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(CONTENT)
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT
    assert server.asked == [f"bytes={len(CONTENT)}-"]


def test_a_part_longer_than_the_file_is_dropped(server: Server, tmp_path: Path) -> None:
    (tmp_path / ".file.bin.part").write_bytes(CONTENT + b"junk")
    assert download_file(server.source(), tmp_path).read_bytes() == CONTENT


def test_a_refusal_says_where_to_look(server: Server, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"answered 404 Not Found: get file\.bin by hand, https://example\.org/page"):
        download_file(server.source(path="/gone"), tmp_path)
    assert len(server.asked) == 1


def test_nobody_there_is_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(downloads, "TIMEOUT", 1.0)
    # Port 9 (discard) is served by nobody here.
    source = Source("file.bin", "http://127.0.0.1:9/file.bin", MD5, "https://example.org/page")
    with pytest.raises(
        ValueError, match=r"cannot be reached .*: check the network, or get file\.bin by hand"
    ) as caught:
        download_file(source, tmp_path)
    assert "\n" not in str(caught.value)


def test_what_has_no_address_is_not_fetched(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"file\.bin cannot be fetched: get it by hand, ask the author"):
        download_file(Source("file.bin", "", "", "ask the author"), tmp_path)

"""The proxy of the chaos trial passes bytes on, cuts, and refuses for a while."""

from __future__ import annotations

import socket
import threading
import time

from chaos.proxy import CuttingProxy


def echo(listener: socket.socket) -> None:
    while True:
        try:
            connection, _ = listener.accept()
        except OSError:
            return
        threading.Thread(target=lambda connection=connection: _answer(connection), daemon=True).start()


def _answer(connection: socket.socket) -> None:
    with connection:
        while content := connection.recv(1000):
            connection.sendall(content)


def test_bytes_pass_until_the_connection_is_cut() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        threading.Thread(target=echo, args=(listener,), daemon=True).start()
        with CuttingProxy(listener.getsockname()[1]) as proxy:
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as connection:
                connection.sendall(b"hello")
                assert connection.recv(5) == b"hello"
                assert proxy.cut_connections(refused_seconds=0.5) == 1
                assert connection.recv(5) == b""
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as refused:
                assert refused.recv(5) == b""
            time.sleep(0.6)
            with socket.create_connection(("127.0.0.1", proxy.port), timeout=5.0) as connection:
                connection.sendall(b"again")
                assert connection.recv(5) == b"again"

"""A TCP proxy that cuts connections, as a firewall or a cable would."""

from __future__ import annotations

import contextlib
import selectors
import socket
import threading
import time

CHUNK = 1 << 16


class CuttingProxy:
    """Forwards a port of this machine to another one, until it is told to cut. Leaving the block closes it."""

    def __init__(self, target: int) -> None:
        self._target, self._refuses_until = target, 0.0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = int(self._listener.getsockname()[1])
        self._pairs = list[tuple[socket.socket, socket.socket]]()
        self._lock, self._is_closed = threading.Lock(), False
        threading.Thread(target=self._accept_connections, daemon=True).start()

    def __enter__(self) -> CuttingProxy:
        return self

    def __exit__(self, *error: object) -> None:
        self._is_closed = True
        self._listener.close()
        self.cut_connections()

    def cut_connections(self, refused_seconds: float = 0.0) -> int:
        """Close all connections, and refuse new ones for a while; returns how many were closed."""
        self._refuses_until = time.monotonic() + refused_seconds
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(*pair)
        return len(pairs)

    def _accept_connections(self) -> None:
        while not self._is_closed:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            if time.monotonic() < self._refuses_until:
                client.close()
                continue
            try:
                server = socket.create_connection(("127.0.0.1", self._target), timeout=5.0)
            except OSError:
                client.close()
                continue
            with self._lock:
                self._pairs.append((client, server))
            threading.Thread(target=self._forward, args=(client, server), daemon=True).start()

    def _forward(self, client: socket.socket, server: socket.socket) -> None:
        """Pass bytes on in both directions until one side closes."""
        other_side = {client: server, server: client}
        with contextlib.suppress(OSError, ValueError), selectors.DefaultSelector() as selector:
            for side in other_side:
                side.settimeout(30.0)
                selector.register(side, selectors.EVENT_READ)
            while True:
                for key, _ in selector.select(timeout=60.0):
                    source = key.fileobj
                    assert isinstance(source, socket.socket)
                    content = source.recv(CHUNK)
                    if not content:
                        raise ConnectionError
                    other_side[source].sendall(content)
        with self._lock, contextlib.suppress(ValueError):
            self._pairs.remove((client, server))
        _close(client, server)


def _close(*connections: socket.socket) -> None:
    for connection in connections:
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
        connection.close()

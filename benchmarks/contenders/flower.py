"""Flower's simulation: client apps in Ray actors, one per core, and a server app that averages.

The server app pushes and pulls messages itself, polling every 2 ms: `send_and_receive` would sleep 100 ms at a time.
Weights travel as one flat array, the cheapest form.
"""

from __future__ import annotations

import os

os.environ.update(FLWR_TELEMETRY_ENABLED="0", FLWR_DISABLE_UPDATE_CHECK="1", RAY_USAGE_STATS_ENABLED="0")

import tempfile
import time
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.simulation import run_simulation

from contenders.torch_loop import Client
from harness.work import CLIENTS, Work

POLL = 0.002


def main(work: Work, answer_requests: Callable[..., None]) -> None:
    """Serve from inside the server app, so that starting Ray is no part of any measurement."""
    actors = len(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "work.npz"
        work.save(path)
        resources = {"init_args": {"num_cpus": actors}, "client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
        run_simulation(
            _make_server_app(work, answer_requests), _make_client_app(str(path)), CLIENTS, backend_config=resources
        )


def _make_server_app(work: Work, answer_requests: Callable[..., None]) -> ServerApp:
    app = ServerApp()

    @app.main()
    def rounds(grid: Grid, context: Context) -> None:
        while len(nodes := sorted(grid.get_node_ids())) < CLIENTS:
            time.sleep(POLL)

        def run(rounds: int) -> np.ndarray:
            weights = work.start
            for number, cohort in enumerate(work.clients[:rounds]):
                visits = [(nodes[client], number, position) for position, client in enumerate(cohort)]
                messages = [Message(_make_record(weights, *where), node, "train") for node, *where in visits]
                weights = np.mean(_pull_replies(grid, messages), axis=0)
            return weights

        answer_requests(run, processes=len(os.sched_getaffinity(0)))

    return app


def _make_client_app(path: str) -> ClientApp:
    app = ClientApp()

    @app.train()
    def visit(message: Message, context: Context) -> Message:
        sent = message.content
        work, client = _load_work(path)
        batches = torch.from_numpy(work.rows[sent["visit"]["round"], sent["visit"]["position"]])
        weights = client.visit(torch.from_numpy(sent["model"]["weights"].numpy().copy()), batches)
        return Message(RecordDict({"model": _to_array_record(weights.numpy())}), reply_to=message)

    return app


@lru_cache(maxsize=1)
def _load_work(path: str) -> tuple[Work, Client]:
    """Once per actor."""
    work = Work.load(Path(path))
    return work, Client(work)


def _make_record(weights: np.ndarray, number: int, position: int) -> RecordDict:
    return RecordDict(
        {"model": _to_array_record(weights), "visit": ConfigRecord({"round": number, "position": position})}
    )


def _to_array_record(weights: np.ndarray) -> ArrayRecord:
    return ArrayRecord({"weights": Array(weights)})


def _pull_replies(grid: Grid, messages: list[Message]) -> list[np.ndarray]:
    """In the cohort's order: summed as they arrive, rounding now and then tips a rectifier, and results differ."""
    sent = list(grid.push_messages(messages))
    replies: dict[str, np.ndarray] = {}
    while waiting := set(sent) - set(replies):
        replies: list[Any] = list(grid.pull_messages(waiting))
        for reply in replies:
            if reply.has_error():
                raise RuntimeError(f"a client failed: {reply.error.reason}")
            replies[reply.metadata.reply_to_message_id] = reply.content["model"]["weights"].numpy()
        if not replies:
            time.sleep(POLL)
    return [replies[message] for message in sent]

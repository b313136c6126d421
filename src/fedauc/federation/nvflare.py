"""The adapter to NVFlare: a job's controller at the server is a `Grid`, its executor at a site answers one message.

NVFlare starts a process per job at the server and at every site, deploys the job there, and carries its tasks. The
server's process runs the rounds; a site's process imports torch once and answers every message of the run. No code
travels: a job names the classes of this module, which every site has installed and must list in its `resources.json`.

Nothing else in the library imports NVFlare. `nvflare_federation.py` writes the files of a project, a site and a job.
"""

from __future__ import annotations

import contextlib
import importlib
import logging
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from nvflare.apis.client import Client
from nvflare.apis.controller_spec import ClientTask, Task, TaskCompletionStatus
from nvflare.apis.event_type import EventType
from nvflare.apis.executor import Executor
from nvflare.apis.fl_constant import ReturnCode
from nvflare.apis.fl_context import FLContext
from nvflare.apis.impl.controller import Controller
from nvflare.apis.shareable import Shareable
from nvflare.apis.signal import Signal

from fedauc.federation.exchange import LOG, Node, Reply
from fedauc.federation.large_messages import prepare_for_large_messages
from fedauc.federation.nvflare_federation import SITE_FILE, TASK_NAME
from fedauc.federation.run_config import serve_run
from fedauc.federation.serialization import Payload
from fedauc.federation.site import answer_failure
from fedauc.federation.site_control import answer_at_site
from fedauc.federation.site_data import SiteData
from fedauc.federation.site_table import SiteTable
from fedauc.federation.site_worker import LOCK_NAME, LOCK_SECONDS
from fedauc.federation.toml_files import read_toml_file
from fedauc.guards import TrainingStopped
from fedauc.locks import hold_lock

SITE_KEYS = ("data", "state", "policy", "share", "share-auc", "load")
"""What a site's own file may hold; `load` is `module:function`, for rows that are no file."""


LOG_FILE = "site.log"
"""The site's log in its state folder."""


def payload_to_shareable(payload: Payload) -> Shareable:
    """A payload as NVFlare's Shareable; the body is bytes, because NVFlare would write an array as a file of numpy."""
    shareable = Shareable()
    shareable["text"], shareable["body"] = payload.header_text, payload.body.tobytes()
    return shareable


def payload_from_shareable(shareable: Shareable) -> Payload:
    """The payload in a Shareable, which may hold anything."""
    text, body = shareable.get("text"), shareable.get("body")
    if not isinstance(text, str) or not isinstance(body, bytes):
        raise ValueError(
            f"the message holds a {type(text).__name__} and a {type(body).__name__}; expected are str, bytes"
        )
    return Payload(text, np.frombuffer(body, np.uint8))


# ------------------------------------------------------------------------------------------------ the server's side


class FlareGrid:
    """The clients of a job as a `Grid`. A client is known by the name in its certificate, which NVFlare verifies."""

    def __init__(self, controller: Controller, context: FLContext, abort_signal: Signal) -> None:
        self._controller, self._context, self._abort_signal = controller, context, abort_signal
        self._replies: dict[str, tuple[float, Reply]] = {}
        self._lock = threading.Lock()
        self._names: list[str] = []

    def online_nodes(self) -> list[Node]:
        """The clients that the job was deployed to, without those that NVFlare considers dead."""
        self._check_job()
        names = [client.name for client in self._context.get_engine().get_clients()]
        self._names += [name for name in names if name not in self._names]
        alive = [name for name in names if self._controller.get_client_disconnect_time(name) is None]
        return [Node(self._names.index(name), name) for name in alive]

    def push_message(self, node_id: int, payload: Payload, seconds: float) -> str:
        """Schedule a task for a client, which fetches it; after so many seconds it is dropped, and so is its reply."""
        message_id, expires = uuid.uuid4().hex, time.monotonic() + seconds

        def receive_result(client_task: ClientTask, fl_ctx: FLContext) -> None:
            self._add_reply(_read_result(message_id, client_task.result), expires)

        def end_task(task: Task, fl_ctx: FLContext) -> None:
            if task.completion_status != TaskCompletionStatus.OK:
                reason = f"NVFlare ended the task: {task.completion_status.value}"
                self._add_reply(Reply(message_id, None, reason), expires)

        callbacks = {"result_received_cb": receive_result, "task_done_cb": end_task}
        task = Task(TASK_NAME, payload_to_shareable(payload), timeout=math.ceil(seconds), **callbacks)
        self._controller.send(task, self._context, targets=[self._names[node_id]])
        return message_id

    def pull_replies(self, message_ids: Sequence[str]) -> list[Reply]:
        """The replies to these messages that have arrived."""
        self._check_job()
        now = time.monotonic()
        with self._lock:
            self._replies = {name: entry for name, entry in self._replies.items() if entry[0] > now}
            return [self._replies.pop(message_id)[1] for message_id in message_ids if message_id in self._replies]

    def _add_reply(self, reply: Reply, expires: float) -> None:
        with self._lock:
            self._replies.setdefault(reply.message_id, (expires, reply))

    def _check_job(self) -> None:
        if self._abort_signal.triggered:
            raise TrainingStopped("NVFlare has ended the job; submit the run again with resume=true to go on")


def _read_result(message_id: str, result: Shareable) -> Reply:
    code = result.get_return_code()
    if code != ReturnCode.OK:
        return Reply(message_id, None, f"NVFlare reports {code}")
    try:
        return Reply(message_id, payload_from_shareable(result))
    except ValueError as error:  # This payload will be refused by its reader.
        return Reply(message_id, Payload(f'"{error}"', np.zeros(0, np.uint8)))


class RunController(Controller):  # type: ignore[misc]
    """The workflow of a job: start the run that the job's settings describe, or resume it, and train it to its end."""

    def __init__(self, settings: Mapping[str, Any]) -> None:
        super().__init__()
        self._settings = dict(settings)

    def start_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to prepare."""

    def control_flow(self, abort_signal: Signal, fl_ctx: FLContext) -> None:
        """Run all rounds; an error ends the job with the status that NVFlare gives to exceptions."""
        serve_run(FlareGrid(self, fl_ctx, abort_signal), self._settings)

    def stop_controller(self, fl_ctx: FLContext) -> None:
        """Nothing to clean up: the folder holds every finished round."""

    def process_result_of_unknown_task(
        self, client: Client, task_name: str, client_task_id: str, result: Shareable, fl_ctx: FLContext
    ) -> None:
        """Drop an answer that came after its deadline."""
        LOG.info("ignored a late answer of site %r", client.name)


# --------------------------------------------------------------------------------------------------- a site's side


class SiteExecutor(Executor):  # type: ignore[misc]
    """Answers messages with the rows that the site's own file names, under the site's policy and in its audit log."""

    def __init__(self) -> None:
        super().__init__()
        self._site_config: dict[str, Any] = {}
        self._lock = contextlib.ExitStack()

    def handle_event(self, event_type: str, fl_ctx: FLContext) -> None:
        """Read the site's file when a run starts, and hold the lock of its state folder until the run ends.

        From then on the site's log is a file in that folder: NVFlare shows its own logs of a site to the server, and
        ours may quote rows.
        """
        if event_type == EventType.START_RUN:
            folder = Path(fl_ctx.get_engine().get_workspace().get_site_config_dir())
            self._site_config = read_site_config(folder / SITE_FILE)
            state = Path(self._site_config["state"])
            state.mkdir(mode=0o700, parents=True, exist_ok=True)
            busy = f"process {{pid}} uses the state folder {state}; give every site a folder of its own"
            self._lock.enter_context(hold_lock(state / LOCK_NAME, busy, LOCK_SECONDS))
            log_to_file(state / LOG_FILE)
            prepare_for_large_messages()
        elif event_type == EventType.END_RUN:
            self._lock.close()

    def execute(self, task_name: str, shareable: Shareable, fl_ctx: FLContext, abort_signal: Signal) -> Shareable:
        """One message in, one answer out."""
        try:
            payload = payload_from_shareable(shareable)
            load_rows = find_loader(str(self._site_config.get("load", "")))
            answer = answer_at_site(self._site_config, payload, lambda: load_rows(self._site_config))
        except Exception as error:  # NVFlare would send the text of an exception, which may quote rows.
            answer = answer_failure(error)
        return payload_to_shareable(answer)


def log_to_file(path: Path) -> None:
    """Write our log to a file that only the site's owner can read, and nowhere else."""
    path.touch(mode=0o600)
    handler, logger = logging.FileHandler(path, encoding="utf-8"), logging.getLogger("fedauc")
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
    logger.addHandler(handler)
    logger.propagate = False
    logger.setLevel(logging.INFO)


def read_site_config(path: Path) -> dict[str, Any]:
    """A site's own file, which its owner writes into the `local` folder of the site's startup kit."""
    config = read_toml_file(path, "the site's file", f"write {SITE_FILE} with data and state")
    unknown, missing = sorted(config.keys() - SITE_KEYS), [name for name in ("data", "state") if name not in config]
    if unknown or missing:
        wrong = f"has {unknown[0]!r}" if unknown else f"lacks {missing[0]!r}"
        raise ValueError(f"{path} {wrong}; it may hold {', '.join(SITE_KEYS)}, and needs data and state")
    return config


def find_loader(name: str) -> Callable[[Mapping[str, Any]], SiteData | SiteTable]:
    """The function `module:function` that reads a site's rows; without a name, files and folders of arrays are read."""
    if not name:
        return load_rows_at_path
    module, _, function = name.partition(":")
    loader: Callable[[Mapping[str, Any]], SiteData | SiteTable] = getattr(importlib.import_module(module), function)
    return loader


def load_rows_at_path(config: Mapping[str, Any]) -> SiteData | SiteTable:
    """The rows at `data`: a CSV, Parquet or Arrow file with named columns, or a folder of x.npy and y.npy."""
    path = Path(str(config["data"]))
    if path.is_dir():
        return SiteData.from_folder(path)
    return SiteTable.from_file(path, cache=Path(str(config["state"])) / "rows", label="y")

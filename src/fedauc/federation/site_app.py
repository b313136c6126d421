"""The Flower app inside a site's resident worker: one message in, one reply out, as in Flower's own client process.

The app's code comes with the run, as a bundle that Flower calls a FAB. It is loaded once; a worker never loads a second
one, because Python would mix the modules of both.
"""

from __future__ import annotations

from typing import Any

from flwr.app import Context, Error, Message, RecordDict
from flwr.app.message import remove_content_from_message
from flwr.cli.install import install_from_fab
from flwr.clientapp import ClientApp
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode
from flwr.common.serde import message_to_proto
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    no_object_id_recompute,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.task_identity import TaskIdentity

# Imported here, because it takes seconds and every app needs it.
import fedauc.federation.flower
from fedauc.federation.site_worker import LOG, Frame, FrameHandler


def make_handler() -> FrameHandler:
    """What a worker does with its parent's requests: `load` the app, then `answer` messages."""
    app: ClientApp | None = None

    def answer_request(request: Frame) -> Frame:
        nonlocal app
        if request.header["kind"] == "load":
            app = load_client_app(request)
            return Frame({"kind": "loaded"})
        assert app is not None
        return answer_flower_message(app, request)

    return answer_request


def load_client_app(request: Frame) -> ClientApp:
    """Install the bundle where Flower would install it, and import its ClientApp."""
    header = request.header
    install_from_fab(bytes(request.blobs[0]), skip_prompt=True)
    load_app = get_load_client_app_fn(default_app_ref="", app_path=None, multi_app=True)
    return load_app(header["fab_id"], header["fab_version"], header["fab_hash"])


def answer_flower_message(app: ClientApp, request: Frame) -> Frame:
    """Let the app answer a message, both as Flower's objects by their ids."""
    header = request.header
    TaskIdentity.run_id, TaskIdentity.node_id, TaskIdentity.task_id = header["run_id"], header["node_id"], 0
    contents = {name: bytes(blob) for name, blob in zip(header["objects"], request.blobs, strict=True)}
    message: Any = inflate_object_from_contents(header["message_id"], contents)
    message.metadata.__dict__["_message_id"] = header["message_id"]
    context = Context(
        run_id=header["run_id"],
        node_id=header["node_id"],
        node_config=header["node_config"],
        state=RecordDict(),
        run_config=header["run_config"],
    )
    try:
        reply = app(message=message, context=context)
    except Exception as error:  # The app's own code may raise anything.
        LOG.error("the app could not answer", exc_info=error)
        reason = f"the app raised {type(error).__name__}; see the site's log"
        reply = Message(Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, reason), reply_to=message)
    return pack_flower_message(reply)


def pack_flower_message(message: Message) -> Frame:
    """A message as a frame: the message without its content, the tree of its objects, and the objects."""
    message.metadata.__dict__["_message_id"] = message.object_id
    envelope = message_to_proto(remove_content_from_message(message)).SerializeToString()
    with no_object_id_recompute():
        tree = get_object_tree(message).SerializeToString()
        objects = {name: value.deflate() for name, value in get_all_nested_objects(message).items()}
    return Frame({"kind": "reply", "objects": list(objects)}, (envelope, tree, *objects.values()))


assert fedauc.federation.flower

"""A SuperNode's Runtime API on loopback, with Flower's own state and server, but no SuperLink.

Tests put messages in, as the SuperNode would after it received them, and take replies out before
it would send them. Everything in between is Flower's.
"""

import hashlib
import threading
import time
from pathlib import Path

import numpy as np
import uvicorn
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.app.metadata import Metadata
from flwr.cli.build import build_fab_from_disk
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.inflatable.inflatable_object import (
    get_all_nested_objects,
    get_object_tree,
    iterate_object_tree,
)
from flwr.supercore.inflatable.inflatable_utils import inflate_object_from_contents
from flwr.supercore.object_store import ObjectStoreFactory
from flwr.supercore.run import Run
from flwr.supernode.main import create_app
from flwr.supernode.nodestate import NodeStateFactory

from flower_ext.cli.superlink import HOST, free_port

PLAIN = Path(__file__).parent / "plain_app"
NODE, RUN = 77, 4711


class LoopbackSuperNode:
    """A SuperNode that has joined one run of an app; use it in a ``with`` statement."""

    def __init__(self, secret: bytes | None = b"secret", app: Path = PLAIN, partition: int = 0):
        objects = ObjectStoreFactory()
        factory = NodeStateFactory(objectstore_factory=objects)
        self.state, self.store, self.port = factory.state(), objects.store(), free_port()
        self.fab = build_fab_from_disk(app)
        self.digest = hashlib.sha256(self.fab).hexdigest()
        self.state.set_node_id(NODE)
        run = Run.create_empty(RUN)
        run.fab_id, run.fab_version, run.fab_hash = "somebody/plain", "1.0.0", self.digest
        self.state.store_run(run)
        self.state.store_fab(Fab(self.digest, self.fab, {}))
        self.state.set_run_series_context(
            run.series_id,
            Context(
                run_id=RUN,
                node_id=NODE,
                node_config={"partition-id": partition},
                state=RecordDict(),
                run_config={},
                series_id=run.series_id,
            ),
        )
        self.series = run.series_id
        self._server = uvicorn.Server(
            uvicorn.Config(
                create_app(factory, superexec_auth_secret=secret),
                host=HOST,
                port=self.port,
                log_level="error",
            )
        )
        self._thread = threading.Thread(target=self._server.run)

    @property
    def address(self) -> str:
        return f"{HOST}:{self.port}"

    def __enter__(self):
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        return self

    def __exit__(self, *_):
        self._server.should_exit = True
        self._thread.join()

    def send(self, arrays=None, message_type="train", error=None, **config) -> str:
        """Put a message in, and return its id; with ``error`` it has no content."""
        if arrays is None:
            arrays = {"vector": np.zeros(4, np.float32)}
        record = ArrayRecord({name: Array(array) for name, array in arrays.items()})
        content = RecordDict(
            {"arrays": record, "config": ConfigRecord({"way": "honest", **config})}
        )
        return self.send_content(content, message_type, error=error)

    def send_content(self, content, message_type="train", group_id="1", error=None) -> str:
        """Put a message with this content in, and return its id."""
        metadata = Metadata(
            run_id=RUN,
            message_id="",
            src_node_id=1,
            dst_node_id=NODE,
            reply_to_message_id="",
            group_id=group_id,
            created_at=time.time(),
            ttl=3600.0,
            message_type=message_type,
        )
        if error is None:
            message = Message(metadata=metadata, content=content)
        else:
            message = Message(metadata=metadata, error=error)
        message_id = message.object_id
        metadata.__dict__["_message_id"] = message_id
        assert self.state.create_task(TaskType.CLIENT_APP, RUN, self.digest) is not None
        self.store.preregister(RUN, get_object_tree(message))
        for object_id, each in get_all_nested_objects(message).items():
            self.store.put(object_id, each.deflate())
        self.state.store_message(Message(metadata=metadata, content=RecordDict()))
        return message_id

    def replies(self) -> list[Message]:
        """Take the new replies out."""
        replies = []
        for message in self.state.get_messages_legacy(is_reply=True):
            message_id = message.metadata.message_id
            tree = self.store.get_object_tree(message_id)
            contents = {}
            for part in iterate_object_tree(tree):
                contents[part.object_id] = self.store.get(part.object_id)
            replies.append(inflate_object_from_contents(message_id, contents))
            self.state.delete_messages(
                message_ids=[message_id, message.metadata.reply_to_message_id]
            )
            self.store.delete(message_id)
        return replies

    @property
    def memory(self) -> RecordDict:
        """The app's memory of the run, which stays on the node."""
        return self.state.get_run_series_context(self.series).state

"""The only module that uses private names of Flower's Runtime API, for the guard and its child.

The module stands apart from `federation`, because the child imports it for every message, and
importing `federation` takes three seconds.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from struct import Struct

import httpx
from flwr.app import ArrayRecord, Context, Error, Message, RecordDict
from flwr.cli.install import install_from_fab
from flwr.clientapp.utils import get_load_client_app_fn
from flwr.common.constant import ErrorCode, SubStatus
from flwr.common.serde import (
    context_from_proto,
    context_to_proto,
    fab_to_proto,
    message_from_proto,
    message_to_proto,
    recorddict_from_proto,
    recorddict_to_proto,
    run_from_proto,
    run_to_proto,
)
from flwr.proto.message_pb2 import Context as ProtoContext
from flwr.proto.message_pb2 import Message as ProtoMessage
from flwr.proto.recorddict_pb2 import RecordDict as ProtoRecordDict
from flwr.proto.runtime_pb2 import (
    AcquireTaskRequest,
    PullTaskInputResponse,
    PushTaskOutputRequest,
    SendTaskHeartbeatRequest,
)
from flwr.supercore.constant import TaskType
from flwr.supercore.fab import Fab
from flwr.supercore.heartbeat import HeartbeatSender
from flwr.supercore.interceptors import (
    RuntimeTokenHttpInterceptor,
    RuntimeVersionHttpInterceptor,
    SuperExecAuthHttpInterceptor,
)
from flwr.supercore.protobuf.client import ProtobufClientInterceptor
from flwr.supercore.run import Run
from flwr.supercore.runtime import RuntimeHttpClient
from flwr.supercore.task_identity import TaskIdentity
from flwr.supernode.runtime.run_clientapp import pull_task_input, push_message

from flower_ext.errors import InvalidValue

Disconnected = httpx.HTTPError
"""Raised if the SuperNode refuses a call, or does not answer it."""

_LENGTH = Struct("!Q")


@dataclass(frozen=True, kw_only=True)
class RuntimeRequest:
    """A message for an app, with everything that the app's process needs."""

    message: Message
    context: Context
    run: Run
    fab: Fab
    """The app, as the SuperLink sent it."""

    def to_bytes(self) -> bytes:
        """Return the input of `run_app`."""
        task = PullTaskInputResponse(
            task_id=TaskIdentity.task_id,
            context=context_to_proto(self.context),
            run=run_to_proto(self.run),
            fab=fab_to_proto(self.fab),
        )
        return joined(task.SerializeToString(), message_to_proto(self.message).SerializeToString())


class Runtime:
    """A SuperNode's Runtime API at ``host:port``, which hands out tasks.

    Without CA certificates to verify the API's certificate, the connection is not encrypted.
    ``secret`` is the SuperNode's SuperExec secret.
    """

    def __init__(self, address: str, *, root_certificates: Path | None, secret: bytes) -> None:
        self._address, self._certificates = address, root_certificates
        methods = {"/flwr.proto.Runtime/AcquireTask"}
        self._client = self._connect(
            SuperExecAuthHttpInterceptor(master_secret=secret, protected_methods=methods)
        )

    def is_open(self) -> bool:
        """Return True if the SuperNode hands tasks to processes without the secret."""
        try:
            self._connect().AcquireTask(AcquireTaskRequest(supported_task_types=[]))
        except httpx.HTTPStatusError:
            return False
        return True

    def acquire(self) -> str | None:
        """Return the token of the next ClientApp task, or None if there is none."""
        request = AcquireTaskRequest(supported_task_types=[TaskType.CLIENT_APP])
        return self._client.AcquireTask(request).token

    def task(self, token: str) -> RuntimeTask:
        """Return the task to which a token belongs."""
        return RuntimeTask(self._connect(RuntimeTokenHttpInterceptor(token)))

    def _connect(self, *interceptors: ProtobufClientInterceptor) -> RuntimeHttpClient:
        return RuntimeHttpClient.from_server_address(
            self._address,
            self._certificates is None,
            None if self._certificates is None else self._certificates.read_bytes(),
            [RuntimeVersionHttpInterceptor(component_name="flwr-clientapp"), *interceptors],
        )


class RuntimeTask:
    """One task of a SuperNode: a message that waits for its reply."""

    def __init__(self, client: RuntimeHttpClient) -> None:
        self._client = client

    def is_alive(self) -> bool:
        """Return True if the SuperNode still waits for the reply; each call extends the wait."""
        try:
            return self._client.SendTaskHeartbeat(SendTaskHeartbeatRequest()).success
        except httpx.HTTPStatusError as error:
            if error.response.is_server_error:
                raise
            return False

    @contextmanager
    def kept_alive(self) -> Iterator[None]:
        """Extend the wait regularly during the block."""

        def extend() -> bool:
            try:
                self.is_alive()
            except httpx.HTTPError:
                return False  # the sender tries again
            return True

        sender = HeartbeatSender(extend)
        sender.start()
        try:
            yield
        finally:
            sender.stop()

    def pull(self) -> RuntimeRequest:
        """Return the task's message; this works once for a task."""
        message, context, run, fab = pull_task_input(self._client)
        return RuntimeRequest(message=message, context=context, run=run, fab=fab)

    def push(self, message: bytes, context: bytes) -> None:
        """Hand the SuperNode a reply and the context that the app left, and finish the task."""
        reply = message_from_proto(ProtoMessage.FromString(message))
        left = ProtoContext.FromString(context)
        push_message(self._client, reply, context_from_proto(left))
        self._client.PushTaskOutput(
            PushTaskOutputRequest(context=left, sub_status=SubStatus.COMPLETED, details="")
        )


def reply_bytes(request: RuntimeRequest, body: RecordDict | Error) -> bytes:
    """Return a reply as bytes. Its metadata depend on the request and the present time alone."""
    return bytes(message_to_proto(Message(body, reply_to=request.message)).SerializeToString())


def refusal(reason: object) -> Error:
    """Return the body of a refusal. ``reason`` must not depend on the site's data."""
    return Error(ErrorCode.CLIENT_APP_RAISED_EXCEPTION, f"flower-ext guard: {reason}")


def context_bytes(context: Context, state: RecordDict | None) -> bytes:
    """Return a context as bytes. If ``state`` is not None, it takes the place of the old state."""
    proto = context_to_proto(context)
    if state is not None:
        proto.state.CopyFrom(recorddict_to_proto(state))
    return bytes(proto.SerializeToString())


def read_answer(answer: bytes) -> tuple[RecordDict, RecordDict]:
    """Return the content and the state that an app's process wrote as bytes.

    The process may be hostile, so this may raise any error.
    """
    content, state = (ProtoRecordDict.FromString(part) for part in parts_of(answer))
    return recorddict_from_proto(content), recorddict_from_proto(state)


def run_app(request: bytes) -> bytes:
    """Install a request's app, run it on the message, and return the answer as bytes."""
    parts = parts_of(request)
    pulled = PullTaskInputResponse.FromString(parts[0])
    run, context = run_from_proto(pulled.run), context_from_proto(pulled.context)
    # Without a task, Flower refuses to make replies.
    TaskIdentity.task_id, TaskIdentity.run_id = pulled.task_id, run.run_id
    TaskIdentity.node_id = context.node_id
    folder = install_from_fab(pulled.fab.content, skip_prompt=True)
    app = get_load_client_app_fn("", str(folder), multi_app=True)(
        run.fab_id, run.fab_version, pulled.fab.hash_str
    )
    reply = app(message=message_from_proto(ProtoMessage.FromString(parts[1])), context=context)
    content = reply.content if reply.has_content() else RecordDict()
    return joined(
        recorddict_to_proto(content).SerializeToString(),
        recorddict_to_proto(context.state).SerializeToString(),
    )


def joined(*parts: bytes) -> bytes:
    """Join byte strings into one, which `parts_of` takes apart."""
    return b"".join(_LENGTH.pack(len(part)) + part for part in parts)


def only_arrays(content: RecordDict) -> tuple[str, ArrayRecord] | None:
    """Return the name and the value of the only ArrayRecord; None if there are none or several."""
    records = list(content.array_records.items())
    return records[0] if len(records) == 1 else None


def parts_of(whole: bytes) -> list[bytes]:
    """Take apart the byte strings that `joined` joined; raise an error for any other bytes."""
    parts, start = [], 0
    while start < len(whole):
        (length,) = _LENGTH.unpack_from(whole, start)
        start += _LENGTH.size + length
        if start > len(whole):
            raise InvalidValue("the bytes end inside a part: expected bytes that `joined` returned")
        parts.append(whole[start - length : start])
    return parts

"""A ClientApp that answers for many clients of its process at a time, and trains them in batches.

In the server's process, the ClientApp answers for a cohort (see `engines.in_process`). On a node,
it answers for all clients whose messages a `VirtualGrid` packed into one message. Each client has
its own partition, state, noise and errors, as if it were alone on its node.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.failures import CLIENT_APP_RAISED, REASON_WITHHELD, failed
from flower_ext.federation.packing import answer_packed, is_packed
from flower_ext.federation.records import Update, UploadReply
from flower_ext.training import MEMORY_LIMIT
from flower_ext.training.isolation import isolated

Answer = RecordDict | Update | Exception
"""One client's answer in a list of several clients' answers."""


class CohortApp(ClientApp):
    """A ClientApp that can also answer for several clients of this process at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.cohort_answers: dict[str, Callable[..., Sequence[Answer]]] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message for one client, or a packed message of a `VirtualGrid` for several.

        If a client raises an error, the reply is an error reply of `failed`, whose text reveals
        nothing about the client's data.
        """
        if is_packed(message):
            answer = partial(answer_packed, answer=partial(answer_all, self))
            return _answered(self, message, context, answer)
        return _answered(self, message, context, self._answer_alone)

    def _answer_alone(self, message: Message, context: Context) -> Message:
        kind = message.metadata.message_type
        if not private.answers(self, kind):
            raise InvalidValue.tellable(
                f"this ClientApp does not answer messages of type {kind!r}: build it by "
                "client_app with the method that the server runs"
            )
        return super().__call__(message, context)

    def answer(
        self, messages: Sequence[Message], contexts: Sequence[Context], *, memory_limit: int
    ) -> list[Message]:
        """Return replies in the order of ``messages``, which are all of one known type."""
        before = [context.state.copy() if context.state else None for context in contexts]
        answer = self.cohort_answers[messages[0].metadata.message_type]
        contents: Sequence[Answer]
        try:
            with isolated():
                contents = answer(messages, contexts, memory_limit=memory_limit)
        except Exception as error:  # an error in an object that clients share, such as the task
            contents = [error] * len(messages)
        replies = []
        for message, context, state, content in zip(
            messages, contexts, before, contents, strict=True
        ):
            if isinstance(content, Exception):
                context.state = RecordDict() if state is None else state
                replies.append(failed(self, message, context, content))
            elif isinstance(content, Update):
                replies.append(UploadReply(message, content))
            else:
                replies.append(private.reply_to(message, content))
        return replies


def answer_all(
    app: ClientApp,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    *,
    memory_limit: int = MEMORY_LIMIT,
) -> list[Message]:
    """Return replies in the order of ``messages``; answer for a cohort at once if the app can.

    If a client raises an error, its reply is an error and its changes to its state are undone. The
    other clients' answers do not depend on the error.
    """
    kinds = {message.metadata.message_type for message in messages}
    if (
        isinstance(app, CohortApp)
        and len(kinds) == 1
        and kinds <= set(app.cohort_answers)
        and len({id(context) for context in contexts}) == len(contexts)
    ):
        return app.answer(messages, contexts, memory_limit=memory_limit)
    return [_answer(app, *pair) for pair in zip(messages, contexts, strict=True)]


def _answer(app: ClientApp, message: Message, context: Context) -> Message:
    known = isinstance(app, CohortApp) or private.answers(app, message.metadata.message_type)
    if not known:  # another project's app: the server is finding out if it uses this package
        unknown = Error(code=CLIENT_APP_RAISED, reason=REASON_WITHHELD)
        return Message(unknown, reply_to=message)
    # Messages may share their records, and another project's app may write into what it gets.
    content = message.content
    message.content = content.copy() if isinstance(app, CohortApp) else deepcopy(content)
    return _answered(app, message, context, app)


def _answered(
    app: ClientApp,
    message: Message,
    context: Context,
    answer: Callable[[Message, Context], Message],
) -> Message:
    before = context.state.copy()
    try:
        with isolated():
            reply = answer(message, context)
        if not isinstance(reply, Message) or not isinstance(context.state, RecordDict):
            raise TypeError(
                "the ClientApp must return a Message, and leave a RecordDict in context.state"
            )
        return reply
    except Exception as error:  # whatever a ClientApp raises becomes an error reply
        context.state = before
        return failed(app, message, context, error)

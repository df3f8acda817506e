"""A ClientApp for one or several methods: it trains, evaluates, and answers questions.

A method supplies two functions (`ClientMethod`), written for one client. `assign` prepares their
input from a message. `upload_of` runs them, bounds their results and adds noise before anything
leaves the client, so no method can forget one of these steps. The memory that a method returns
cannot reach a reply.

The app can answer for many clients at a time, and then trains them in batches. These clients are a
cohort in the server's process (`engines.in_process`), or the clients of one node whose messages a
`VirtualGrid` packed into one message. Each client has its own partition, state, noise and errors,
as if it were alone on its node.
"""

from collections.abc import Callable, Sequence
from copy import deepcopy
from functools import partial
from typing import TypeVar

from flwr.app import Context, Error, Message, RecordDict
from flwr.clientapp import ClientApp

from flower_ext.errors import InvalidValue
from flower_ext.federation import _flower_private as private
from flower_ext.federation.client.client_method import ClientMethod
from flower_ext.federation.client.client_side import ClientSide
from flower_ext.federation.client.hidden_errors import failed
from flower_ext.federation.messages.addresses import IDENTITY, identity
from flower_ext.federation.messages.failures import CLIENT_APP_RAISED, REASON_WITHHELD
from flower_ext.federation.messages.packing import answer_packed, is_packed
from flower_ext.federation.messages.records import SUM
from flower_ext.federation.messages.upload_reply import Update, UploadReply
from flower_ext.federation.sums.masked import MaskedMember
from flower_ext.federation.sums.summation import ClientSum
from flower_ext.federation.sums.weighted_silo import WeightedSilo
from flower_ext.privacy import SecureScores
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.training import MEMORY_LIMIT, Task
from flower_ext.training.isolation import isolated

K = TypeVar("K", VectorQuery, ClientSum)
Answer = RecordDict | Update | Exception
"""One client's answer in a list of several clients' answers."""
_USUAL_SUMS: Sequence[type[ClientSum]] = (MaskedMember, WeightedSilo)


class CohortApp(ClientApp):
    """A ClientApp that can also answer for several clients of this process at a time.

    ``cohort_answers`` maps each type of message to the function that answers it for several
    clients. ``sides`` maps each method's name to the method's client side.
    """

    def __init__(self) -> None:
        super().__init__()
        self.cohort_answers: dict[str, Callable[..., Sequence[Answer]]] = {}
        self.sides: dict[str, ClientSide] = {}

    def __call__(self, message: Message, context: Context) -> Message:
        """Answer a message for one client, or a packed message of a `VirtualGrid` for several.

        If a client raises an error, `failed` makes an error reply. Its text reveals nothing about
        the client's data.
        """
        kind = message.metadata.message_type
        answer: Callable[[Message, Context], Message] = super().__call__
        if is_packed(kind):
            answer = partial(answer_packed, answer=partial(answer_all, self))
        elif not private.has_function_for(self, kind):
            reason = (
                f"this ClientApp does not answer messages of type {kind!r}: build it by "
                "client_app with the method that the server runs"
            )
            return failed(self, message, context, InvalidValue.tellable(reason))
        return _reply_or_error(self, message, context, answer)


def client_app(
    *methods: ClientMethod,
    task: Task | Callable[[Context], Task],
    allow_seeded_noise: bool = False,
    queries: Sequence[type[VectorQuery]] = (),
    sums: Sequence[type[ClientSum]] = (),
) -> CohortApp:
    """Return a ClientApp that answers the messages of one or several methods.

    Parameters
    ----------
    *methods : ClientMethod
    task : Task | Callable[[Context], Task]
        The task, or a function that builds it from the run's configuration. All clients share one
        task; each client asks it for the data of the client's partition.
    allow_seeded_noise : bool
        True if the server may ask for reproducible noise. Use it for simulation only, because
        anybody who knows the seed can remove the noise. The owner of a SuperNode can forbid such
        noise by ``--node-config "require-secure-noise=true"``.
    queries : Sequence[type[VectorQuery]]
        Kinds of queries that clients answer, in addition to `SecureScores`.
    sums : Sequence[type[ClientSum]]
        Clients' ends of sums in which clients take part, in addition to plain, masked and weighted
        sums.

    Raises
    ------
    InvalidValue
        A class in ``queries`` is no `VectorQuery`, or one in ``sums`` no `ClientSum`; or two have
        the same name; or the name of a sum does not begin with `records.SUM`.
    """
    app = CohortApp()
    named_queries = _by_name(VectorQuery, [SecureScores, *queries])
    named_sums = _by_name(ClientSum, [*_USUAL_SUMS, *sums])
    if wrong := [name for name in named_sums if not name.startswith(SUM)]:
        raise InvalidValue(f"name={wrong[0]!r} of a ClientSum: expected {SUM!r}, then a word")

    def identities(
        messages: Sequence[Message], contexts: Sequence[Context], **_: object
    ) -> list[RecordDict]:
        return [identity(context.node_config) for context in contexts]

    app.cohort_answers[IDENTITY] = identities
    app.query("identity")(partial(_reply_alone, identities))
    for method in methods:
        side = app.sides[method.name] = ClientSide(
            method, task, allow_seeded_noise, named_queries, named_sums
        )
        app.cohort_answers[f"train.{method.name}"] = side.train
        app.cohort_answers[f"evaluate.{method.name}"] = side.score
        app.train(method.name)(partial(_reply_alone, partial(side.train, alone=True)))
        app.evaluate(method.name)(partial(_reply_alone, side.score))
        app.query(method.name)(side.answer)
    return app


def _by_name(base: type[object], kinds: Sequence[type[K]]) -> dict[str, type[K]]:
    by_name: dict[str, type[K]] = {}
    for kind in kinds:
        if not (isinstance(kind, type) and issubclass(kind, base)):
            raise InvalidValue(f"{kind!r}: expected a subclass of {base.__name__}")
        if (other := by_name.setdefault(kind.name, kind)) is not kind:
            raise InvalidValue(
                f"name={kind.name!r} of {kind.__name__}: expected a name that {other.__name__} "
                "does not have"
            )
    return by_name


def _reply_alone(
    answer_cohort: Callable[..., Sequence[Answer]], message: Message, context: Context
) -> Message:
    """Return the reply of a client that is alone in its cohort, or raise its error."""
    (answer,) = answer_cohort([message], [context])
    if isinstance(answer, Exception):
        raise answer
    return Message(answer.content() if isinstance(answer, Update) else answer, reply_to=message)


def reply_of(message: Message, answer: Error | RecordDict | Update | Message) -> Message:
    """Return the reply to a message of this process, without serialising the answer."""
    if isinstance(answer, Message):
        return answer
    if isinstance(answer, Error):
        return Message(answer, reply_to=message)
    if isinstance(answer, Update):
        return UploadReply(message, answer)
    return private.reply_to(message, answer)


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
        answer = partial(app.cohort_answers[kinds.pop()], memory_limit=memory_limit)
        return _replies_or_errors(app, messages, contexts, answer)
    return [_reply_of_app(app, *pair) for pair in zip(messages, contexts, strict=True)]


def _reply_of_app(app: ClientApp, message: Message, context: Context) -> Message:
    is_ours = isinstance(app, CohortApp)
    if not is_ours and not private.has_function_for(app, message.metadata.message_type):
        # Another project's app: the server is finding out whether the app uses this package.
        unknown = Error(code=CLIENT_APP_RAISED, reason=REASON_WITHHELD)
        return Message(unknown, reply_to=message)
    # Messages may share their records, and another project's app may write into what it gets.
    message.content = message.content.copy() if is_ours else deepcopy(message.content)
    return _reply_or_error(app, message, context, app)


def _reply_or_error(
    app: ClientApp,
    message: Message,
    context: Context,
    answer: Callable[[Message, Context], Message],
) -> Message:
    def answer_cohort_of_one(*_: object) -> list[Message]:
        reply = answer(message, context)
        if not isinstance(reply, Message) or not isinstance(context.state, RecordDict):
            raise TypeError(
                "the ClientApp must return a Message, and leave a RecordDict in context.state"
            )
        return [reply]

    (reply,) = _replies_or_errors(app, [message], [context], answer_cohort_of_one)
    return reply


def _replies_or_errors(
    app: ClientApp,
    messages: Sequence[Message],
    contexts: Sequence[Context],
    answer_cohort: Callable[..., Sequence[Answer | Message]],
) -> list[Message]:
    before = [context.state.copy() if context.state else RecordDict() for context in contexts]
    answers: Sequence[Answer | Message]
    try:
        with isolated():
            answers = answer_cohort(messages, contexts)
    except Exception as error:  # of a foreign app, or of an object that clients share
        answers = [error] * len(messages)
    replies = []
    for message, context, state, answer in zip(messages, contexts, before, answers, strict=True):
        if isinstance(answer, Exception):
            context.state = state
            replies.append(failed(app, message, context, answer))
        else:
            replies.append(reply_of(message, answer))
    return replies

"""A ClientApp for one or several methods: it trains, evaluates, and answers questions.

A method supplies two functions (`ClientMethod`), written for one client. `work_of` prepares their
input from a message. `upload_of` runs them, bounds their results and adds noise before anything
leaves the client, so no method can forget one of these steps. The memory that a method returns
cannot reach a reply.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from flwr.app import Context, Message, RecordDict

from flower_ext.federation import records
from flower_ext.federation.client.answering import answer_question
from flower_ext.federation.client.client_method import ClientMethod
from flower_ext.federation.client.client_side import ClientSide
from flower_ext.federation.client.cohort_app import Answer, CohortApp
from flower_ext.federation.roster import IDENTITY, identity
from flower_ext.privacy import SecureScores
from flower_ext.privacy.queries.vector_query import VectorQuery
from flower_ext.training import Task


class MethodsApp(CohortApp):
    """A ClientApp for several methods; ``sides`` maps a method's name to its client side."""

    def __init__(self) -> None:
        super().__init__()
        self.sides: dict[str, ClientSide] = {}


def client_app(
    *methods: ClientMethod,
    task: Task | Callable[[Context], Task],
    allow_seeded_noise: bool = False,
    queries: Sequence[type[VectorQuery]] = (),
) -> MethodsApp:
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
    """
    app = MethodsApp()
    kinds: dict[str, type[VectorQuery]] = {"scores": SecureScores}
    kinds |= {kind.name: kind for kind in queries}

    @app.query("identity")
    def _(message: Message, context: Context) -> Message:
        return Message(identity(context.node_config), reply_to=message)

    app.cohort_answers[IDENTITY] = _identities

    for method in methods:
        side = app.sides[method.name] = ClientSide(method, task, allow_seeded_noise, kinds)
        app.cohort_answers[f"train.{method.name}"] = side.train
        app.cohort_answers[f"evaluate.{method.name}"] = side.score

        @app.train(method.name)
        def _(message: Message, context: Context, side: ClientSide = side) -> Message:
            return _reply(message, side.train([message], [context], alone=True))

        @app.evaluate(method.name)
        def _(message: Message, context: Context, side: ClientSide = side) -> Message:
            return _reply(message, side.score([message], [context]))

        @app.query(method.name)
        def _(message: Message, context: Context, side: ClientSide = side) -> Message:
            return answer_question(side, message, context)

    return app


def _identities(
    messages: Sequence[Message], contexts: Sequence[Context], *, memory_limit: int
) -> list[RecordDict | Exception]:
    return [identity(context.node_config) for context in contexts]


def _reply(message: Message, answers: Sequence[Answer]) -> Message:
    (answer,) = answers
    if isinstance(answer, Exception):
        raise answer
    content = answer.content() if isinstance(answer, records.Update) else answer
    return Message(content, reply_to=message)

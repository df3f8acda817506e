"""The guard as a member of masked sums: the guard, not the app, bounds, noises and masks.

The guard applies `client_level_dp_mod` in its own process. The app gets only the model, and the
guard treats the app's answer as an update like any other. Before a reply leaves, the guard writes
the keys of a sum to a folder that no app can read.

Guarantees
----------
A masked sum that becomes known holds the vectors of at least `SumPolicy.honest_answers` members
that do not collude, each with noise of ``noise_multiplier`` clipping norms or more. Between any two
data sets of the site, and any two behaviours of the app, the sum differs by at most two clipping
norms.
"""

from collections.abc import Callable

from flwr.app import ArrayRecord, Context, Message, RecordDict

from flower_ext.errors import InvalidValue
from flower_ext.federation.client.client_level_mod import client_level_dp_mod
from flower_ext.federation.messages import records
from flower_ext.federation.messages.addresses import PARTITION
from flower_ext.federation.sums.masked import MASKED_SUM
from flower_ext_guard.flower_runtime import RuntimeRequest
from flower_ext_guard.policy import GuardPolicy, MessagePolicy, Refused

_MOD = client_level_dp_mod()


def asks_for_contribution(message: Message) -> bool:
    """Return True if a message of a sum asks for a vector. Only the app can compute vectors."""
    return records.MODEL in message.content and MASKED_SUM in message.content


def answer_in_sum(
    request: RuntimeRequest,
    policy: GuardPolicy,
    rule: MessagePolicy,
    run_app: Callable[[Message], ArrayRecord | None],
) -> RecordDict:
    """Answer a message of a masked sum, or refuse it with a text that depends on no data.

    ``run_app`` returns None if the app failed in any way.
    """

    def train(message: Message, context: Context) -> Message:
        if (arrays := run_app(message)) is None:
            raise InvalidValue("the app did not answer with one ArrayRecord")
        return Message(RecordDict({records.MODEL: arrays}), reply_to=message)

    assert policy.sum is not None
    # Nothing in the context comes from the app or the server.
    node_config = {
        "require-secure-noise": True,
        "require-secure-sum": True,
        "least-noise-multiplier": rule.noise_multiplier,
        "state-folder": str(policy.path.with_suffix(".sums")),
        **policy.sum.node_config,
    }
    if (partition := request.context.node_config.get(PARTITION)) is not None:
        node_config[PARTITION] = partition
    context = Context(
        run_id=request.run.run_id,
        node_id=request.context.node_id,
        node_config=node_config,
        state=RecordDict(),
        run_config={},
        series_id=request.context.series_id,
    )
    # The mod answers any error by an error reply. Under require-secure-sum it passes no message on,
    # so it calls ``train`` only where it catches errors.
    reply = _MOD(request.message, context, train)
    if reply.has_error():
        raise Refused(reply.error.reason)
    return reply.content

"""An experiment on the guard: a hostile app reports whether a canary is in the site's data.

The app moves the model as far as it can, in one direction with the canary, and in the opposite
direction without it. The adversary must learn no more than the ε in the guard's ledger permits.
"""

from functools import partial

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import FedAvg

from flower_ext.federation.messages import records
from flower_ext.federation.messages.records import to_record
from flower_ext.privacy import AdversaryView, SecureNoise, privacy_loss_of
from flower_ext_audit.experiment import Experiment, World, projected
from flower_ext_guard import release
from flower_ext_guard.policy import UPDATE, MessagePolicy

_SIZE, _HUGE, _DELTA = 8, 1e6, 1e-5
_AXIS = np.eye(1, _SIZE)[0]


def guard_experiment(noise_multiplier: float = 1.0) -> Experiment:
    """Return the experiment, in which a single client answers with a huge update.

    The update moves one weight by 1e6 if the canary is in the data, and by −1e6 if it is not. The
    guard clips the update and adds noise.
    """
    policy = MessagePolicy(
        release=UPDATE, clipping_norm=1.0, noise_multiplier=noise_multiplier, constants={"n": 1}
    )

    strategy = partial(
        FedAvg,
        fraction_evaluate=0.0,
        min_train_nodes=1,
        min_available_nodes=1,
        weighted_by_key="n",
        arrayrecord_key=records.MODEL,
    )

    def world(pull: float) -> World:
        return World(strategy=strategy, client_app=_guarded(pull, policy), num_clients=1)

    return Experiment(
        name="guard",
        without=world(-_HUGE),
        present=world(_HUGE),
        initial=ArrayRecord({"weight": Array(np.zeros(_SIZE))}),
        score=projected({"weight": _AXIS}),
        views=[AdversaryView.EACH_UPLOAD],
        reported={
            AdversaryView.EACH_UPLOAD: privacy_loss_of([policy.spend()], delta=_DELTA).epsilon
        },
        delta=_DELTA,
        gaussian=True,
    )


def _guarded(pull: float, policy: MessagePolicy) -> ClientApp:
    """Return a ClientApp that moves one weight by ``pull`` and sends what the guard releases."""
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        request = release.requested_arrays(message.content.array_records[records.MODEL], policy)
        answer = ArrayRecord({"weight": Array(request["weight"] + pull * _AXIS)})
        leaving = release.released(request, answer, policy, SecureNoise())
        content = RecordDict(
            {records.MODEL: to_record(leaving), "metrics": MetricRecord(dict(policy.constants))}
        )
        return Message(content, reply_to=message)

    return app

"""An audit of one of Flower's own strategies, with a ClientApp that does not use this package."""

import numpy as np
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp.strategy import DifferentialPrivacyServerSideFixedClipping, FedAvg

from flower_ext.privacy import AdversaryView, gaussian_loss
from flower_ext_audit import Experiment, World, projected

CLIENTS, CLIPPING_NORM, NOISE_MULTIPLIER, DELTA = 2, 1.0, 0.5, 1e-5


def client_app(canary: bool) -> ClientApp:
    app = ClientApp()

    @app.train()
    def train(message: Message, context: Context) -> Message:
        (weights,) = message.content["arrays"].to_numpy_ndarrays()
        weights = weights.copy()
        weights[1] += 1e-9  # Flower's clipping divides by the norm, which must not be 0
        if canary and context.node_config["partition-id"] == 0:
            weights[0] += 1e3
        content = {"arrays": ArrayRecord([weights]), "metrics": MetricRecord({"num-examples": 1})}
        return Message(RecordDict(content), reply_to=message)

    return app


def experiment(divisor: int = CLIENTS) -> Experiment:
    def strategy():
        plain = FedAvg(fraction_evaluate=0.0, min_train_nodes=CLIENTS, min_available_nodes=CLIENTS)
        return DifferentialPrivacyServerSideFixedClipping(
            plain, NOISE_MULTIPLIER, CLIPPING_NORM, num_sampled_clients=divisor
        )

    def world(canary: bool) -> World:
        return World(strategy=strategy, client_app=client_app(canary), num_clients=CLIENTS)

    direction = np.zeros(100)
    direction[0] = 1.0
    epsilon = gaussian_loss(NOISE_MULTIPLIER, releases=1, delta=DELTA).epsilon
    return Experiment(
        name="Flower's fixed clipping",
        without=world(False),
        present=world(True),
        initial=ArrayRecord([np.zeros(100)]),
        score=projected({"0": direction}),
        views=[AdversaryView.RELEASED_MODELS],
        reported={AdversaryView.RELEASED_MODELS: epsilon},
        delta=DELTA,
        gaussian=True,
    )


def wrong() -> Experiment:
    """Print the ε for a mean over eight clients although two take part: a quarter of the noise."""
    return experiment(divisor=4 * CLIENTS)

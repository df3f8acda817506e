"""pfl-research's FederatedAveraging in its simulator.

Runs as a file, in an environment of its own: pfl and Flower want different versions of the same
packages.
"""

# mypy: ignore-errors
import random

import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.dataset import Dataset
from pfl.data.federated_dataset import FederatedDataset
from pfl.hyperparam.base import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Metrics, Weighted
from pfl.model.pytorch import PyTorchModel
from pfl.privacy.gaussian_mechanism import GaussianMechanism
from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism
from torch.nn.functional import cross_entropy
from workload import (
    BATCH,
    CLIPPING_NORM,
    LEARNING_RATE,
    NOISE_MULTIPLIER,
    Clock,
    examples,
    parse,
)


class Model(torch.nn.Module):
    """A module with the methods that pfl requires."""

    def __init__(self, build):
        super().__init__()
        self.inner = build()

    def forward(self, x):
        return self.inner(x)

    def loss(self, x, y, is_eval=False):
        return cross_entropy(self(x), y)

    @torch.no_grad()
    def metrics(self, x, y):
        return {"loss": Weighted(float(self.loss(x, y)) * len(y), len(y))}


class Ticking(TrainingProcessCallback):
    def __init__(self, clock):
        self.clock = clock

    def after_central_iteration(self, aggregate_metrics, model, *, central_iteration):
        self.clock.tick()
        return False, Metrics()


def main() -> None:
    """Run the workload."""
    workload = parse()
    rng, clock = random.Random(0), Clock()
    cohort = []

    def next_client():
        if not cohort:
            cohort.extend(rng.sample(range(workload.clients), workload.cohort))
        return cohort.pop()

    def dataset(client):
        return Dataset(raw_data=list(examples(workload, client)), user_id=str(client))

    data = FederatedDataset(dataset, next_client)
    postprocessors = []
    if workload.private:
        mechanism = GaussianMechanism(CLIPPING_NORM, NOISE_MULTIPLIER)
        postprocessors = [CentrallyAppliedPrivacyMechanism(mechanism)]
    network = Model(workload.build)
    model = PyTorchModel(
        network,
        local_optimizer_create=torch.optim.SGD,
        central_optimizer=torch.optim.SGD(network.parameters(), lr=1.0),
    )
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(
            central_num_iterations=workload.rounds,
            evaluation_frequency=10**9,
            train_cohort_size=workload.cohort,
            val_cohort_size=0,
        ),
        backend=SimulatedBackend(data, data, postprocessors=postprocessors),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=BATCH
        ),
        model_eval_params=NNEvalHyperParams(local_batch_size=None),
        callbacks=[Ticking(clock)],
        send_metrics_to_platform=False,
    )
    clock.report()


if __name__ == "__main__":
    main()

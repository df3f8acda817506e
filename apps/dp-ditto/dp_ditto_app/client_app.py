"""Client side: one ClientApp answers for all methods of this app."""

from dp_ditto_app.task import task_of
from flower_ext.algorithms import Apple, DPDitto, FedALA, FedAMP, PFedMe
from flower_ext.federation import client_app

app = client_app(
    DPDitto.client,
    PFedMe.client,
    FedAMP.client,
    Apple.client,
    FedALA.client,
    task=task_of,
    allow_seeded_noise=True,
)

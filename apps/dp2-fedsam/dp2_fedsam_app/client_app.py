"""Client side: one ClientApp answers for all methods of this app."""

from dp2_fedsam_app.task import task_of
from flower_ext.algorithms import APFL, DP2FedSAM, DPFedAvg, FedPer
from flower_ext.federation import client_app

app = client_app(
    *(method.client for method in (DP2FedSAM, DPFedAvg, FedPer, APFL)),
    task=task_of,
    allow_seeded_noise=True,
)

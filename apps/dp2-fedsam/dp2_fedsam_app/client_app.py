"""Client side: one ClientApp answers for all methods of this app."""

from dp2_fedsam_app.task import task_of
from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.federation import client_app

app = client_app(DP2FedSAM.client, DPFedAvg.client, task=task_of, allow_seeded_noise=True)

"""The ClientApp of a project on texts."""

from flower_ext.algorithms import DP2FedSAM, DPFedAvg
from flower_ext.federation import client_app
from texts.task import task_of

app = client_app(DPFedAvg.client, DP2FedSAM.client, task=task_of, allow_seeded_noise=True)

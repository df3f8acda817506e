"""Client side: one ClientApp answers for all methods of this app."""

from demo_app.task import task_of
from flower_ext.algorithms import DPFedAvg
from flower_ext.federation import client_app

app = client_app(DPFedAvg.client, task=task_of, allow_seeded_noise=True)

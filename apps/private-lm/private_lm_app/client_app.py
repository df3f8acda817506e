"""Client side: one ClientApp answers for all methods of this app."""

from flower_ext.algorithms import DPFedAvg, UldpAvg
from flower_ext.federation import client_app
from private_lm_app.task import task_of

app = client_app(DPFedAvg.client, UldpAvg.client, task=task_of, allow_seeded_noise=True)

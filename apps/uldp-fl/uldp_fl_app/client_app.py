"""Silo side: one ClientApp answers for all methods of this app."""

from flower_ext.algorithms import DPFedAvg, UldpAvg, UldpGroup, UldpNaive
from flower_ext.federation import client_app
from uldp_fl_app.task import task_of

app = client_app(
    UldpAvg.client,
    UldpNaive.client,
    UldpGroup.client,
    DPFedAvg.client,
    task=task_of,
    allow_seeded_noise=True,
)

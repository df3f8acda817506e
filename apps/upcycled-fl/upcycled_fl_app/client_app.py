"""Client side: one ClientApp answers for all methods of this app."""

from flower_ext.algorithms import DPFedAvg, FedDyn, PFedMe, Scaffold
from flower_ext.federation import client_app
from upcycled_fl_app.task import task_of

app = client_app(
    DPFedAvg.client,
    Scaffold.client,
    FedDyn.client,
    PFedMe.client,
    task=task_of,
    allow_seeded_noise=True,
)

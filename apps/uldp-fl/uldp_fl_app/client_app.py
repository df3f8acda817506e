"""Silo side: one ClientApp answers for all methods of this app."""

from importlib.util import find_spec

from flower_ext.algorithms import DPFedAvg, UldpAvg, UldpGroup, UldpNaive
from flower_ext.federation import client_app
from uldp_fl_app.task import task_of

methods = [UldpAvg.client, UldpNaive.client, UldpGroup.client, DPFedAvg.client]
if find_spec("phe") is not None:  # the extra `weighting`
    from flower_ext.algorithms.uldp import PrivateUldpAvg

    methods.append(PrivateUldpAvg.client)

app = client_app(
    *methods,
    task=task_of,
    allow_seeded_noise=True,
)

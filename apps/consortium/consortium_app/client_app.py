"""Silo side: one ClientApp answers for statistics and for training."""

from consortium_app.task import silo_task_of
from flower_ext.algorithms import UldpAvg
from flower_ext.federation import client_app
from flower_ext_consortium.statistics import UserStatistics

app = client_app(UldpAvg.client, UserStatistics.client, task=silo_task_of, allow_seeded_noise=True)

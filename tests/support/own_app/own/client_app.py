"""The client side: only the method and the task."""

from flower_ext.algorithms import DPFedAvg
from own.task import task

app = DPFedAvg.client_app(task)

"""Data sets and their partitions among clients."""

from flower_ext.data.datasets import DatasetInfo, describe, load, names
from flower_ext.data.devices import DevicesInfo, describe_devices, device_names, load_devices
from flower_ext.data.examples import ClientData, Examples, SiloData
from flower_ext.data.partition import dirichlet, iid, partition, pathological, split
from flower_ext.data.silos import SilosInfo, describe_silos, histogram, load_silos, silo_names
from flower_ext.data.sources import FOLDER_VARIABLE, DataNotFound
from flower_ext.data.synthetic import within_unit_ball
from flower_ext.data.users import (
    Allocation,
    Distribution,
    allocate,
    allocate_within,
    group_size,
    limit_contributions,
)

__all__ = [
    "FOLDER_VARIABLE",
    "Allocation",
    "ClientData",
    "DataNotFound",
    "DatasetInfo",
    "DevicesInfo",
    "Distribution",
    "Examples",
    "SiloData",
    "SilosInfo",
    "allocate",
    "allocate_within",
    "describe",
    "describe_devices",
    "describe_silos",
    "device_names",
    "dirichlet",
    "group_size",
    "histogram",
    "iid",
    "limit_contributions",
    "load",
    "load_devices",
    "load_silos",
    "names",
    "partition",
    "pathological",
    "silo_names",
    "split",
    "within_unit_ball",
]

"""Data sets and how they are divided among clients."""

from flower_ext.data.datasets import (
    FOLDER_VARIABLE,
    DataNotFound,
    DatasetInfo,
    describe,
    load,
    names,
)
from flower_ext.data.devices import DevicesInfo, describe_devices, device_names, load_devices
from flower_ext.data.examples import ClientData, Examples
from flower_ext.data.partition import dirichlet, iid, partition, pathological, split
from flower_ext.data.synthetic import within_unit_ball

__all__ = [
    "FOLDER_VARIABLE",
    "ClientData",
    "DataNotFound",
    "DatasetInfo",
    "DevicesInfo",
    "Examples",
    "describe",
    "describe_devices",
    "device_names",
    "dirichlet",
    "iid",
    "load",
    "load_devices",
    "names",
    "partition",
    "pathological",
    "split",
    "within_unit_ball",
]

"""Data sets and their partitions among clients."""

from flower_ext.data.datasets import DatasetInfo, describe, load, names
from flower_ext.data.examples import (
    ClientData,
    Examples,
    SiloData,
    deal_silos,
    histogram,
    within_unit_ball,
)
from flower_ext.data.local_files import FOLDER_VARIABLE, DataNotFound, find_files
from flower_ext.data.partition import dirichlet, iid, partition, pathological, split
from flower_ext.data.users import (
    Allocation,
    Distribution,
    allocate,
    group_size,
    limit_contributions,
)

__all__ = [
    "FOLDER_VARIABLE",
    "Allocation",
    "ClientData",
    "DataNotFound",
    "DatasetInfo",
    "Distribution",
    "Examples",
    "SiloData",
    "allocate",
    "deal_silos",
    "describe",
    "dirichlet",
    "find_files",
    "group_size",
    "histogram",
    "iid",
    "limit_contributions",
    "load",
    "names",
    "partition",
    "pathological",
    "split",
    "within_unit_ball",
]

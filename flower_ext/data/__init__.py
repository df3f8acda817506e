"""Data sets and their partitions among clients."""

from flower_ext.data.datasets import DataNotFound, DatasetInfo, describe, find_files, load, names
from flower_ext.data.examples import ClientData, Examples, within_unit_ball
from flower_ext.data.partition import dirichlet, iid, partition, pathological, split
from flower_ext.data.users import SiloData, group_size, limit_contributions
from flower_ext.files import FOLDER_VARIABLE

__all__ = [
    "FOLDER_VARIABLE",
    "ClientData",
    "DataNotFound",
    "DatasetInfo",
    "Examples",
    "SiloData",
    "describe",
    "dirichlet",
    "find_files",
    "group_size",
    "iid",
    "limit_contributions",
    "load",
    "names",
    "partition",
    "pathological",
    "split",
    "within_unit_ball",
]

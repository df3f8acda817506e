"""Data sets and their partitions among clients."""

from flower_ext.data.datasets import DatasetInfo, describe, load, names
from flower_ext.data.examples import ClientData, Examples, SiloData, within_unit_ball
from flower_ext.data.local_files import DataNotFound, find_files
from flower_ext.data.partition import dirichlet, iid, partition, pathological, split
from flower_ext.data.users import group_size, limit_contributions
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

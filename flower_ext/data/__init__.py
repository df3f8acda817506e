"""Data sets and how they are divided among clients."""

from flower_ext.data.datasets import (
    FOLDER_VARIABLE,
    DataNotFound,
    DatasetInfo,
    describe,
    load,
    names,
)
from flower_ext.data.examples import ClientData, Examples
from flower_ext.data.partition import dirichlet, iid, partition, pathological, split

__all__ = [
    "FOLDER_VARIABLE",
    "ClientData",
    "DataNotFound",
    "DatasetInfo",
    "Examples",
    "describe",
    "dirichlet",
    "iid",
    "load",
    "names",
    "partition",
    "pathological",
    "split",
]

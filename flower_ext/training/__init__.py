"""Local optimisation of torch models, as plain functions over parameter dictionaries."""

from flower_ext.training.local import LocalTraining, evaluate, minimise, train
from flower_ext.training.objective import Linear, Proximal, Term
from flower_ext.training.params import Params, clone, difference, matches, split
from flower_ext.training.task import Task, accuracy
from flower_ext.training.validation import UnshareableModel, check_shareable, replace_batch_norm

__all__ = [
    "Linear",
    "LocalTraining",
    "Params",
    "Proximal",
    "Task",
    "Term",
    "UnshareableModel",
    "accuracy",
    "check_shareable",
    "clone",
    "difference",
    "evaluate",
    "matches",
    "minimise",
    "replace_batch_norm",
    "split",
    "train",
]

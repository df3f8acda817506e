"""Local optimisation of torch models, as plain functions over parameter dictionaries."""

from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.batched.many import (
    train_each,
    train_groups,
    train_surely,
    trains_apart,
)
from flower_ext.training.dp.clipped_gradient import ClippedGradient
from flower_ext.training.dp.dp_sgd import (
    ClippedJob,
    DpSgdTraining,
    StepNoise,
    train_clipped_steps,
    train_dp_sgd,
)
from flower_ext.training.features import Features
from flower_ext.training.local import (
    Job,
    LocalTraining,
    gradient,
    job_batches,
    minimise,
    train,
)
from flower_ext.training.newton import NotConverged, newton
from flower_ext.training.params import Params, clone, difference, matches, part, split, tagged
from flower_ext.training.problem import Linear, LocalProblem, Proximal, Term, local_problem
from flower_ext.training.rounding import products_are_reproducible
from flower_ext.training.scoring import evaluate, evaluate_each
from flower_ext.training.survival import cox_loss
from flower_ext.training.task import Task, accuracy
from flower_ext.training.validation import UnshareableModel, check_shareable, replace_batch_norm

__all__ = [
    "MEMORY_LIMIT",
    "ClippedGradient",
    "ClippedJob",
    "DpSgdTraining",
    "Features",
    "Job",
    "Linear",
    "LocalProblem",
    "LocalTraining",
    "NotConverged",
    "Params",
    "Proximal",
    "StepNoise",
    "Task",
    "Term",
    "UnshareableModel",
    "accuracy",
    "check_shareable",
    "clone",
    "cox_loss",
    "difference",
    "evaluate",
    "evaluate_each",
    "gradient",
    "job_batches",
    "local_problem",
    "matches",
    "minimise",
    "newton",
    "part",
    "replace_batch_norm",
    "split",
    "tagged",
    "train",
    "train_clipped_steps",
    "train_dp_sgd",
    "train_each",
    "train_groups",
    "train_surely",
    "trains_apart",
]

products_are_reproducible()  # must run before MKL's first call

"""Local training of torch models, as plain functions over parameter dictionaries.

====================  =====================================================================
module                contents
====================  =====================================================================
`task`                the model, the loss, the metrics and each partition's data
`kind`                a task's model, loss and shapes, without data: the key of stored results
`models`              models of this package; functions that build, call and check any model
`params`              parameters as dictionaries of tensors
`index_limits`        the integers, such as labels and words, that a task accepts
`job`                 one local training: its settings, examples, mini-batches and noise
`problem`             one client's objective, as a function of the trained parameters
`local`               `train`: sets up a job's problem, takes the steps, returns the model
`scoring`             the loss and the metrics of a model on a client's examples
`single_examples`     the loss and the gradient of each example
`dp`                  steps of DP-SGD, which clip each example's gradient
`batched`             trains many jobs together; only rounding may differ from `local`
`side_by_side`        runs many clients' methods, and groups the trainings that they yield
`trials`              find models in which one example, or one training, changes another
`isolation`           keeps settings and draws of other code from changing a training
====================  =====================================================================
"""

from flower_ext.training.batched.form import MEMORY_LIMIT
from flower_ext.training.batched.many import attempt_groups, train_each, train_groups
from flower_ext.training.dp.dp_sgd import ClippedGradient, DpSgdTraining, train_dp_sgd
from flower_ext.training.isolation import products_are_reproducible
from flower_ext.training.job import Job, LocalTraining, StepNoise
from flower_ext.training.local import NotConverged, job_batches, newton, sgd_step, train
from flower_ext.training.models.validation import (
    UnshareableModel,
    check_shareable,
    replace_batch_norm,
)
from flower_ext.training.params import Params, clone, difference, matches, tagged, untagged
from flower_ext.training.problem import (
    Linear,
    LocalProblem,
    Proximal,
    Term,
    gradient,
    local_problem,
)
from flower_ext.training.scoring import evaluate
from flower_ext.training.task import Task, accuracy

__all__ = [
    "MEMORY_LIMIT",
    "ClippedGradient",
    "DpSgdTraining",
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
    "attempt_groups",
    "check_shareable",
    "clone",
    "difference",
    "evaluate",
    "gradient",
    "job_batches",
    "local_problem",
    "matches",
    "newton",
    "replace_batch_norm",
    "sgd_step",
    "tagged",
    "train",
    "train_dp_sgd",
    "train_each",
    "train_groups",
    "untagged",
]

products_are_reproducible()  # must run before MKL's first call

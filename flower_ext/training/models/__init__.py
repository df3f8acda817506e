"""Models: those that this package offers, and how a task builds, calls and checks any model.

===============  ====================================================================
`architectures`  the models of the experiments, by name
`dropout`        dropout whose masks do not depend on other models in a batch
`factory`        builds the models of a task, which share their frozen parts
`calls`          calls a model with given parameters, on features that may be trees
`validation`     refuses layers whose running statistics must not be shared
===============  ====================================================================
"""

from flower_ext.training.models.architectures import HeadedModel, build

__all__ = ["HeadedModel", "build"]

"""Memory layout of a chain of layers, and types of arguments, which `network` and `sgd` share.

This module imports nothing, because a process that trains must not load Numba.
"""

KIND, INPUTS, OUTPUTS, WEIGHT, BIAS = range(5)
ACTIVATION, TRAINS_WEIGHT, TRAINS_BIAS, ACROSS, GROUPS, SETTING = range(5, 11)
"""Columns of the network's table, which has one row per layer.

=================  ============================================================================
column             meaning
=================  ============================================================================
`KIND`             kind of the layer, such as `DENSE`
`INPUTS`           number of the layer's inputs for one example
`OUTPUTS`          number of its outputs
`WEIGHT`           position of its weight among all numbers of the network; −1 without a weight
`BIAS`             position of its bias; −1 without a bias
`ACTIVATION`       activation after the layer, such as `RELU`
`TRAINS_WEIGHT`    1 if the weight is trained, else 0
`TRAINS_BIAS`      1 if the bias is trained, else 0
`ACROSS`           total number of inputs of all earlier layers
`GROUPS`           number of groups of a normalisation
`SETTING`          1 / ε of a normalisation; number of `LEVELS` that dropout drops; number of
                   rows of the matrix that a turn transposes
=================  ============================================================================
"""
CHANNELS, HEIGHT, WIDTH, FILTERS, OUT_HEIGHT, OUT_WIDTH = range(11, 17)
KERNEL_HEIGHT, KERNEL_WIDTH, DOWN, RIGHT, PAD_DOWN, PAD_RIGHT = range(17, 23)
"""Columns for layers that move a window over images: channels and size of an image before and
after the layer, size of the window, its steps, and the border of zeros."""
COLUMNS = 23
DENSE, NORM, DROP, TURN, CONVOLUTION, POOL, MEAN, IMAGE_NORM = range(8)
"""Kinds of layers. A turn transposes a matrix; `POOL` and `MEAN` take the
maximum and the mean of a window."""
PLAIN, RELU, TANH, SIGMOID = range(4)
"""Activations after a layer."""
LINE = 16
"""Numbers in a line of the processor's caches; every network begins on such a line."""

JOB_NUMBERS = 4
WEIGHTS, START, FEATURES, OFFSET = range(JOB_NUMBERS)
"""Addresses of a job's weights, initial weights and features, and of the offset (see `PULL`)."""
JOB_INTEGERS = 2
TARGETS, ORDER = range(JOB_INTEGERS)
"""Addresses of a job's classes, and of the order in which it uses its rows, epoch after epoch."""
JOB_COUNTS = 4
COUNT, BATCH_SIZE, STEPS, HAS_TERMS = range(JOB_COUNTS)
"""A job's counts of examples, of examples per mini-batch, of steps; 1 if it has extra terms."""
JOB_RATES = 4
LEARNING_RATE, MOMENTUM, SAM_RADIUS, PULL = range(JOB_RATES)
"""A job's rates. The extra terms of its objective have the gradient pull · w + offset at w."""

_INT64, _FLOAT32 = "CPointer(int64)", "CPointer(float32)"
_ROWS_OF_INT64 = f"CPointer({_INT64})"
SIGNATURES: dict[str, tuple[str, ...]] = {
    "train": (
        f"CPointer({_FLOAT32})",  # numbers
        _ROWS_OF_INT64,  # integers
        "CPointer(CPointer(int16))",  # drawn
        _INT64,  # counts
        "CPointer(float64)",  # rates
        "int64",  # jobs
        _INT64,  # table
        "int64",  # depth
        "int64",  # size
        _FLOAT32,  # outputs
        _FLOAT32,  # slopes
        _FLOAT32,  # scratch
        _FLOAT32,  # norms
        _FLOAT32,  # model_scratch
    ),
    "are_classes": (_ROWS_OF_INT64, _INT64, "int64", "int64", _INT64),
}
"""Functions of `sgd` that are compiled, and the types of their arguments, for Numba."""

"""Memory layout of a chain of layers, and types of arguments, which `network` and `sgd` share.

This module imports nothing, because a process that trains must not load Numba.
"""

KIND, INPUTS, OUTPUTS, WEIGHT, BIAS = range(5)
ACTIVATION, TRAINS_WEIGHT, TRAINS_BIAS, PRECEDING_INPUTS, GROUPS, SETTING = range(5, 11)
"""Columns of the network's table, which has one row per layer.

==================  ===========================================================================
column              meaning
==================  ===========================================================================
`KIND`              kind of the layer, such as `DENSE`
`INPUTS`            number of the layer's inputs for one example
`OUTPUTS`           number of the layer's outputs for one example
`WEIGHT`            position of the weight in the network's array; −1 without a weight
`BIAS`              position of the bias in the network's array; −1 without a bias
`ACTIVATION`        activation after the layer, such as `RELU`
`TRAINS_WEIGHT`     1 if the weight is trained, else 0
`TRAINS_BIAS`       1 if the bias is trained, else 0
`PRECEDING_INPUTS`  total number of inputs of all earlier layers
`GROUPS`            number of groups of a normalisation
`SETTING`           of a normalisation, 1 / ε; of dropout, the number of `LEVELS` that it drops;
                    of a transposition, the number of rows of the matrix
==================  ===========================================================================
"""
CHANNELS, HEIGHT, WIDTH, FILTERS, OUT_HEIGHT, OUT_WIDTH = range(11, 17)
KERNEL_HEIGHT, KERNEL_WIDTH, STRIDE_HEIGHT, STRIDE_WIDTH = range(17, 21)
PADDING_HEIGHT, PADDING_WIDTH = range(21, 23)
"""Columns for convolutions and pooling: channels and size of an image before and after the layer;
size and stride of the window; and the rows and columns of zeros on each side of the image."""
COLUMNS = 23
DENSE, NORM, DROPOUT, TRANSPOSE, CONVOLUTION, MAX_POOL, AVERAGE_POOL, IMAGE_NORM = range(8)
"""Kinds of layers.

`NORM` is GroupNorm or LayerNorm of rows; `IMAGE_NORM` is GroupNorm of images. `TRANSPOSE` moves an
image's channels from the first dimension to the last, or back.
"""
IDENTITY, RELU, TANH, SIGMOID = range(4)
"""Activations after a layer."""
LINE = 16
"""Numbers of 32 bits in a line of the processor's caches; every network begins on such a line."""

JOB_FLOATS = 4
WEIGHTS, START, FEATURES, OFFSET = range(JOB_FLOATS)
"""Addresses of a job's trained weights, initial weights, features, and offset (see `PULL`)."""
JOB_INTEGERS = 2
TARGETS, ORDER = range(JOB_INTEGERS)
"""Addresses of a job's classes, and of the order of its examples, epoch after epoch."""
JOB_COUNTS = 4
COUNT, BATCH_SIZE, STEPS, HAS_TERMS = range(JOB_COUNTS)
"""A job's number of examples, size of a mini-batch, number of steps; 1 if it has extra terms."""
JOB_RATES = 4
LEARNING_RATE, MOMENTUM, SAM_RADIUS, PULL = range(JOB_RATES)
"""A job's settings. The extra terms of its objective have the gradient pull · w + offset at w."""

_INT64, _FLOAT32 = "CPointer(int64)", "CPointer(float32)"
_ROWS_OF_INT64 = f"CPointer({_INT64})"
SIGNATURES: dict[str, tuple[str, ...]] = {
    "train": (
        f"CPointer({_FLOAT32})",  # floats
        _ROWS_OF_INT64,  # integers
        "CPointer(CPointer(int16))",  # drawn
        _INT64,  # counts
        "CPointer(float64)",  # rates
        "int64",  # jobs
        _INT64,  # table
        "int64",  # depth
        "int64",  # size
        _FLOAT32,  # outputs
        _FLOAT32,  # gradients
        _FLOAT32,  # scratch
        _FLOAT32,  # norm_memory
        _FLOAT32,  # model_scratch
    ),
    "are_classes": (_ROWS_OF_INT64, _INT64, "int64", "int64", _INT64),
}
"""Functions of `sgd` that are compiled, and the types of their arguments, for Numba."""

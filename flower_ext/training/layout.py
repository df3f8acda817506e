"""How a network of dense layers lies in memory: what `dense` writes and `compiled` reads."""

INPUTS, OUTPUTS, WEIGHT, BIAS, ACTIVATION, TRAINS_WEIGHT, TRAINS_BIAS = range(7)
"""Columns of its table, one row a layer: widths, where weight and bias begin among all numbers (or
−1), what follows the layer, and whether they are trained."""
PLAIN, RELU, TANH, SIGMOID = range(4)
"""What follows a layer."""
LINE = 16
"""Numbers in a line of the processor's caches: every network, and every buffer, begins with one."""

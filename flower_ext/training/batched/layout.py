"""How a network of dense layers lies in memory: what `dense` writes and `compiled` reads."""

COLUMNS = 11
KIND, INPUTS, OUTPUTS, WEIGHT, BIAS = range(5)
ACTIVATION, TRAINS_WEIGHT, TRAINS_BIAS, ACROSS, GROUPS, SETTING = range(5, COLUMNS)
"""Columns of its table, one row a layer: its kind and widths, where weight and bias begin among all
numbers (or −1), what follows the layer, whether they are trained, and the widths of all layers
below. A norm has groups, and 1 / ε; dropout drops so many of `LEVELS`."""
DENSE, NORM, DROP = range(3)
"""Kinds of layers."""
PLAIN, RELU, TANH, SIGMOID = range(4)
"""What follows a layer."""
LINE = 16
"""Numbers in a line of the processor's caches: every network begins with one."""

JOB_NUMBERS = 4
WEIGHTS, START, FEATURES, OFFSET = range(JOB_NUMBERS)
"""Where a job's numbers are: its weights, what they begin as, its examples, its terms' offset."""
JOB_INTEGERS = 2
TARGETS, ORDER = range(JOB_INTEGERS)
"""Where its classes are, and the rows in the order in which they are used, epoch after epoch."""
JOB_COUNTS = 4
COUNT, BATCH_SIZE, STEPS, HAS_TERMS = range(JOB_COUNTS)
"""Its examples, how many of them a mini-batch has, mini-batches, and whether there are terms."""
JOB_RATES = 4
LEARNING_RATE, MOMENTUM, SAM_RADIUS, PULL = range(JOB_RATES)
"""The gradient of all terms of its objective at w is pull · w + offset."""

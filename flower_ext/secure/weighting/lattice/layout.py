"""Sizes that the ring and both of its implementations share; nothing else is imported for them."""

DEGREE = 4096
"""n: coefficients of a polynomial."""
LANES = 8
"""Polynomials that are transformed together. Their coefficients alternate in memory."""
GROUP = DEGREE * LANES
"""Numbers of so many polynomials."""

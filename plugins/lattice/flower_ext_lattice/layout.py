"""Sizes that the ring and both of its implementations share. This module imports nothing."""

DEGREE = 4096
"""n: number of coefficients of a polynomial."""
LANES = 8
"""Number of polynomials that are transformed together. Their coefficients alternate in memory."""
GROUP = DEGREE * LANES
"""Number of coefficients of all polynomials that are transformed together."""

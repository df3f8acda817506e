"""Training alone, together with privacy, and together without, as one Flower app."""

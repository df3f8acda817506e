"""DP-Ditto and its baselines as one Flower app."""

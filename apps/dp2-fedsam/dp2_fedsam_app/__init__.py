"""DP²-FedSAM and its baselines as one Flower app."""

"""Uldp-FL and its baselines as one Flower app."""

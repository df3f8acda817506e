"""Private and personalised federated learning for Flower."""

"""Many trainings at once: which jobs may share a batch, and forms, the ways to train them."""

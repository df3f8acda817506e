"""Many trainings at once: which jobs may share a batch, and the forms (ways) to train them."""

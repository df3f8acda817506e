"""Many trainings at once: who may share a batch, and the forms in which they do."""

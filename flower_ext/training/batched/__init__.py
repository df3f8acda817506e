"""Many trainings at once: the forms (ways) to train jobs together, and the choice among them."""

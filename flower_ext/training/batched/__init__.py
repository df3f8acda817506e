"""Many jobs at once: the forms (ways) to train them together, and the choice among forms."""

"""Plans, which determine the privacy of a run: one plan for each kind of release."""

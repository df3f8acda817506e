"""Privacy plans, which users write: one for each kind of release."""

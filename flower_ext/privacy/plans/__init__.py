"""Plans, in which a user decides about privacy: one plan a kind of release."""

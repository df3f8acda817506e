"""What a user decides about privacy: one plan a kind of release."""

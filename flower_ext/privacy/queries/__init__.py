"""Queries in addition to training, each of which releases one noised sum of vectors."""

"""A consortium's study as a Flower app: statistics first, then training, under one budget."""

"""Trials of a model on made-up examples, before real data are touched."""

"""Plans that determine the privacy of a run: one plan per kind of release."""

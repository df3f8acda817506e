"""The command line: one module per command, and the ways to run an app."""

"""The command line: one module a command, and the ways to run an app."""

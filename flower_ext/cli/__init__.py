"""The command line: a module for each command, and modules that prepare and launch runs."""

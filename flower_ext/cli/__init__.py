"""The command line: one module a command, the launcher and the local deployment."""

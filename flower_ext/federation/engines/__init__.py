"""Engines: clients in this process, in several processes, and many on one node."""

"""Engines that run clients: in this process, in several processes, or many clients on one node."""

"""A guard: a process that runs Flower apps on a site, and bounds what leaves in their replies.

The guard takes the place of ``flwr-clientapp`` on a node. It has the node's token and access to the
network, and runs each app in a child process that has neither. Import names from the modules of
this package: the child must start without importing PyTorch or the rest of `flower_ext`.
"""

"""A guard: a process that runs Flower apps on a site, and bounds what leaves in their replies.

The guard takes the place of ``flwr-clientapp`` on a node. It has the node's token and access to the
network, and runs each app in a child process that has neither. Import names from the modules of
this package. The package itself imports nothing, because the child must start without PyTorch and
the rest of `flower_ext`.
"""

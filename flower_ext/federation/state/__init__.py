"""Files that outlive a process: checkpoints of the server, and memory of the clients."""

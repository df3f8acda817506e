"""What outlives a process: checkpoints of the server, and what a client keeps."""

"""Files that outlive a process: the server's checkpoints and the clients' memory."""

"""Messages between server and clients: their content, its checks, and their exchange."""

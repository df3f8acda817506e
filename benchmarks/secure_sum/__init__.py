"""CPU time and bytes of the secure sum, compared with Flower's legacy SecAgg+."""

"""CPU time and bytes of the secure sum, beside Flower's legacy SecAgg+."""

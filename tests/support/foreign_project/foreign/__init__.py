"""A Flower project that knew nothing of flower_ext before its strategy was exchanged."""

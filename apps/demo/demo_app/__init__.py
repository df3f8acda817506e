"""One Flower app for training alone, together with privacy, and together without privacy."""

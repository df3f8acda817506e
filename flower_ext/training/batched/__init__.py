"""Train many jobs at once: ways to train them together (*forms*), and the choice among forms."""

"""Training cost: all methods in one process on one random model, compared with the mathematical minimum."""

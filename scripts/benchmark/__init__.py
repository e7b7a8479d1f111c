"""What training costs: every method in one process, on one random model, against what the mathematics allows."""

"""The training loop and what it needs: schedule, optimiser, checkpoints."""

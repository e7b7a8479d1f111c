"""Evaluation of a trained model: per-document losses, intervals, the forgetting report."""

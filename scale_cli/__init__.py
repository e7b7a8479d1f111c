"""Continual pre-training of widened language models (SCALE, arXiv 2511.03270)."""

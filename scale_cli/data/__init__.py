"""From documents to batches: reading, tokenising, packing, mixing."""

"""From documents to batches: reading, tokenising, packing, mixing.

A record of a file (formats.py) becomes a `Document` (documents.py), its ids an `Encoded` (encoding.py), which is
written to `tokens.bin` (tokens.py). Windows of it (batches.py) make the micro-batches of a step.
"""

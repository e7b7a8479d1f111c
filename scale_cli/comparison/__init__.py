"""Finished runs beside each other: which can be compared, how each can be served, tables, a figure."""

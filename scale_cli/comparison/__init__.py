"""Finished runs beside each other: which compare, how each can be served, tables, a figure."""

"""The verbs of the command line, one file each.

A verb prints its lines with `log` and returns its figures.
"""

"""The verbs of the command line, a file each: a verb prints its lines by `log`, and returns its figures."""

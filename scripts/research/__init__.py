"""Methods and recipes that were tried and are not in the package: see README.md."""

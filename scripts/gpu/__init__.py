"""What to run on a borrowed GPU: two scripts of at most six minutes each, `speed` and `checks`."""

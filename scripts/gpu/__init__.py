"""What to run on a borrowed GPU: two scripts of 200 and 150 s, `speed` and `checks`."""

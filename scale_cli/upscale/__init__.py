"""From a base checkpoint to a widened one: loading, initialising, proving preservation."""

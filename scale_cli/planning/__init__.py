"""What a run costs, from the base's config.json: no weights are read."""

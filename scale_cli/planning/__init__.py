"""What a run costs, computed from the sizes in the base's config.json: no weights, no torch."""

"""What a run is on disk, and how it is opened."""

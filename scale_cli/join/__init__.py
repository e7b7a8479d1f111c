"""Finished runs on one base, put together: one forward of the base, a router over all their heads."""

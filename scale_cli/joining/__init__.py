"""Finished runs on one base, put together: one forward pass of the base, and a router over all
their heads.
"""

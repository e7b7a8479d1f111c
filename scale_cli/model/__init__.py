"""The widened model: two residual streams over one frozen base, and the routing between their
heads.
"""

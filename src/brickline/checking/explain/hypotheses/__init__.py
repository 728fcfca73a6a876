"""Hypotheses about what is wrong with a region, one family in each module."""

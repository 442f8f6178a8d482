"""Contained errors, warnings that are given once, counts and units: the parts that the whole package uses."""

"""Errors that are contained, what is said once, counts, units: what all parts of the package use."""

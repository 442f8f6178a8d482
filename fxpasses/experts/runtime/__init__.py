"""Products of all experts at once, and their kernels."""

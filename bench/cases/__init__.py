"""One module for each case; each has a `CASE`."""

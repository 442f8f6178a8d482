"""The graph passes, one file each: find, check, rewrite. They know `graph/`, and nothing of runtime values."""

"""The version of the package, which is part of cache keys and records."""

__version__ = "0.1.0"

"""The version of the package, which keys of caches and records hold."""

__version__ = "0.1.0"

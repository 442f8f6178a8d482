"""Saved traces: what Dynamo and the passes have found is kept in a file, and taken from it by another process."""

"""The code that runs in a training step: prologues, their cache, transfers, and this package's operators.

Nothing here knows a graph's nodes.
"""

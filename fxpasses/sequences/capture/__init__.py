"""Loops over parts of a batch, while Dynamo traces: the body is traced once."""

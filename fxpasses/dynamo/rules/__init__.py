"""Handlers for code that Dynamo does not trace, or traces wrongly: one module for each spelling."""

"""What programs write that Dynamo does not trace, or traces wrongly: a module of handlers for each."""

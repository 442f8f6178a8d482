"""What must hold while Dynamo traces: the capture flags, and a way back where they lead into an error."""

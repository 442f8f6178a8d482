"""Capture: what happens while Dynamo traces a frame, and the retraces with fewer features if that fails."""

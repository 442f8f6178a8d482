"""Analyses of FX graphs that the features share. Nothing here knows a pass, a runtime value or Dynamo's tracing."""

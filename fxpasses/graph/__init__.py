"""Analyses of FX graphs that the passes share. Nothing here knows a pass, a runtime value or Dynamo's tracing."""

"""Loops over experts, while Dynamo traces: branches that skip an expert are speculated on."""

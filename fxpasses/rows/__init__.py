"""Live rows: only tokens that can reach the loss are computed."""

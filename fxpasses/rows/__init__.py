"""Live rows: compute only the tokens that can reach the loss."""

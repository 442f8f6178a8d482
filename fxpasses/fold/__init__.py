"""Equal layers are compiled once (pass `fold_layers`): a graph's segments, their repetition, and their bodies."""

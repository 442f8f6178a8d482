"""Equal layers are compiled once (pass `fold_layers`): segments of a graph, which of them repeat, and their bodies."""

"""The parts of `fold_layers`."""

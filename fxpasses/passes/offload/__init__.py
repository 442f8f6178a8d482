"""The parts of `offload_activations`: candidates (from the graphs), choose and schedule (plain data), insert."""

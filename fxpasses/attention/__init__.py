"""The parts of `sparsify_attention`: what attention looks like in a graph, and what takes its place."""

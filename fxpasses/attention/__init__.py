"""The parts of `sparsify_attention`: the spellings of attention in a graph, and the operators that replace them."""

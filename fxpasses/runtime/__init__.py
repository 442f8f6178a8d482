"""The parts that the features' runtimes share: autocast, dispatch modes, CUDA. Nothing here knows a graph's nodes."""

"""What runs in the training step: the prologue and its cache, and transfers. Nothing here knows a graph's nodes."""

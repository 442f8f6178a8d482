"""The parts of `group_experts`: what a query means, what an operator does to rows, where results are merged."""

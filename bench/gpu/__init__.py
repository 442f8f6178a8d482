"""`python -m bench.gpu`: what of fxpasses works on this machine's device, and what it saves there, by a deadline."""

"""How passes run: in order, each on a copy, timed and checked; a pass that fails is dropped alone."""

"""Each way of running a graph issues eager mode's collectives, forward and backward, in eager mode's order.

A rank sees its own batch. It decides alone which variant of a frame it runs, whether it breaks the graph, and whether
it gives a frame up to eager mode; the k-th collective that it issues meets the k-th of the other ranks all the same. So
what a compiler may do to a pure operator it may not do to a collective:

- `partitioner.py`: AOTAutograd merges none, leaves none out, repeats none and moves none past another;
- `recomputed.py`: a checkpoint's recomputation issues again what eager mode's does;
- `as_written.py`: so does a graph that runs uncompiled;
- `in_checkpoints.py`: so does a compiled graph that a checkpoint of eager mode runs;
- `asked_gradients.py`: backward issues none for a gradient that nobody asks for.

`eager_sequences.py` finds out what eager mode does. Where its sequence cannot be kept, a graph runs uncompiled, and
says so; where it is too late for that, the program gets an error. Passes know collectives by `graph/collectives.py`;
`pipeline.py` leaves out a pass that changes what is issued.
"""

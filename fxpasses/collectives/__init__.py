"""Every way of running a graph issues eager mode's collectives, forward and backward, in eager mode's order.

Each rank sees its own batch. It decides alone which variant of a frame it runs, whether it breaks the graph, and
whether it falls back to eager mode; still, its k-th collective meets the k-th of the other ranks. So a compiler may not
treat a collective as a pure operator:

- `partitioner.py`: AOTAutograd does not merge, omit, repeat or reorder collectives;
- `recomputed.py`: a checkpoint's recomputation issues again the collectives that eager mode issues again;
- `as_written.py`: so does a graph that runs uncompiled;
- `in_checkpoints.py`: so does a compiled graph inside a checkpoint of eager mode;
- `requested_gradients.py`: backward issues no collective for a gradient that the program does not request.

`eager_sequences.py` finds eager mode's sequence. A graph that cannot keep it runs uncompiled, with a warning; if it is
too late for that, the program gets an error. Passes recognise collectives by `graph/collectives.py`;
`passes/pipeline.py` drops a pass that changes the sequence.
"""

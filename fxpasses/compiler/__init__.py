"""The backend: from a captured graph to compiled code. `backend` runs the passes and contains failures; `lowering*`
compile the passes' results; `partitioner` divides the joint graph.
"""

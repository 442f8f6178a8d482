"""The backend: from a captured graph to compiled code. `backend` runs the passes and contains what fails; `lowering*`
compile what they make; `partitioner` divides the joint graph.
"""

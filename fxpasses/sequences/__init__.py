"""Loops over the parts that the batch's numbers cut, such as its texts or images, as one computation for all parts.

`capture` traces the body of such a loop once, while Dynamo traces; `batching` has the rules by which it is computed for
all parts at once, and `one_by_one` the operator that runs it part by part.
"""

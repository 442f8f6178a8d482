"""Loops over the parts that the batch's numbers cut, such as its texts or images, as one computation for all parts.

`lists` has the lists that such a program makes, `loops` traces a loop's body once, `batching` has the rules by which
the body is computed for all parts at once, and `handlers` tell Dynamo.
"""

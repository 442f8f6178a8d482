"""Mixtures of experts: a loop over experts becomes one grouped computation (pass `group_experts`).

`capture` speculates, while Dynamo traces, on loops that skip experts without tokens; `routing*` determine what tensors
say about a router's choice; the rest finds the loop, lifts its operators to the rows of all experts, and rewrites it;
`runtime` has the grouped products.
"""

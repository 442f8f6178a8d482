"""Mixtures of experts: a loop over experts becomes one grouped computation (pass `group_experts`).

`capture` speculates on loops that skip experts without tokens, while Dynamo traces; `routing*` say what tensors tell of
a router's choice; the rest finds the loop, says what its operators do to the rows of all experts, and rewrites it;
`runtime` has the grouped products.
"""

"""Activations that leave the device in forward and come back in backward.

    operators ── the operators that the rewritten graphs call
    chain ────── the life of a moved tensor: written, waited for, read ahead, returned; `kept`, a tensor that stays
    tiers ────── `disk` and `host`, where moved tensors wait: each a `tier.Tier`
    device_copies, pinned ─ the streams of an accelerator, and host memory for them
    stats ────── the tensors moved, their cost, and the fallbacks

A *handle* represents a moved tensor: an ordinary CPU tensor of the same size, strides and dtype. Autograd saves and
frees it like any other, and the data behind it goes with its storage: there is nothing to close.
"""

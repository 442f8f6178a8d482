"""Activations that leave the device in forward and come back in backward.

    operators ── what the rewritten graphs call
    chain ────── the life of a moved tensor: written, waited for, read ahead, handed out; `kept`, one that stays
    tiers ────── `disk` and `host`, where it lies meanwhile: each a `tier.Tier`
    device_copies, pinned ─ the streams of an accelerator, and host memory for them
    stats ────── what was moved, what it cost, and what fell back

A moved tensor is stood in for by its *handle*, an ordinary CPU tensor of the same size, strides and dtype. Autograd
saves and frees it like any other, and what lies behind it goes with its storage: there is nothing to close.
"""

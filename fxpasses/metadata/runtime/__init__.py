"""Prologues, their cache, copies to the host, and prefetching."""

"""Pruning: rules → a plan (what is removed, why, how much is freed, what will miss) → execution. Must not import torch.

Prune stores these files in the cache, outside every digest::

    state/trash/<name>-<token>       a removed entry or unit that is not deleted yet; the next prune or warm deletes it
    state/pruned/<digest>.json       the removed entries of one lookup digest: when and why
    state/pruned/<digest>.missed     one byte for each lookup of that digest that has missed since

An entry is removed as a whole: renamed into the trash under its claim (`cgtool.store.leases`), flushed, then deleted.
"""

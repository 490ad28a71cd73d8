"""Pruning: rules → a plan (what goes, why, what comes free, what will miss) → its execution. Must not import torch.

What it keeps in a cache, outside of every digest::

    state/trash/<name>-<token>       an entry or unit that is gone and not deleted yet; the next prune or warm does it
    state/pruned/<digest>.json       which entries of a digest of cheap facts were removed, when and why
    state/pruned/<digest>.missed     one byte for each lookup of that digest that ended in a miss since

Entries go whole: renamed into the trash under their claim (`cgtool.store.leases`), flushed, then deleted.
"""

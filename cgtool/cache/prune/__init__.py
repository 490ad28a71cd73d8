"""Pruning: rules → a plan (what goes, why, what comes free, what will miss) → its execution. Must not import torch."""

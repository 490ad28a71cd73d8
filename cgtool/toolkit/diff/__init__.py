"""Two sides and what differs between them, the most telling first: keys, traced lines, guards, pieces, artifacts.

Reads caches and writes nothing. Must not import torch.
"""

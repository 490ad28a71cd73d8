"""Compares two caches or entries by keys, traced lines, guards, pieces and artifacts; root causes come first.

Reads caches and writes nothing. Must not import torch.
"""

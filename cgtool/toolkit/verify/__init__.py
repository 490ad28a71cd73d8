"""Checking a cache: every digest, completeness, and whether this machine can load it. Must not import torch."""

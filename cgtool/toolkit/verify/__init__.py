"""Cache verification: digests, completeness, and whether this machine can load each entry. Must not import torch."""

"""Inspects a cache, and the coverage, key, graph and artifacts of its entries. Importable without torch."""

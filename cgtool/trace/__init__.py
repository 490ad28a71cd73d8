"""Traces a model on an example call into one graph, with its guards, sources and outputs as data."""

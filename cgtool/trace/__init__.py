"""Trace: a model and an example call become one graph, with its guards, sources and outputs as data."""

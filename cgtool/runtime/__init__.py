"""Find a cache entry for a model and run it, with torch alone.

Imports neither Dynamo nor Inductor, so that a process that starts from the cache does not pay for them.
"""

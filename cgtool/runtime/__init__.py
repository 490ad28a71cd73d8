"""From a plan and opened artifacts to a callable, with torch alone.

Imports neither Dynamo nor Inductor, so that a process which starts from the cache never pays for them.
"""

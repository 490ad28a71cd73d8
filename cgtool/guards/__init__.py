"""Conditions under which an artifact is valid for a model: sources, guard kinds, code digests, torch's global state.

The tracer records guards and the runtime checks them. Imports torch, but never Dynamo or Inductor.
"""

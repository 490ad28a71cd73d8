"""Proof: an artifact is run in a child process before a manifest names it. Must not import Dynamo or Inductor."""

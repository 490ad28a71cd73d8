"""What must hold for an artifact to serve a model: sources, kinds of guards, code digests, the environment.

Shared by the tracer, which writes guards down, and by the runtime, which checks them. Imports torch alone, never Dynamo
or Inductor.
"""

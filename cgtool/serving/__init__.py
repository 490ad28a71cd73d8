"""The serving runtime: which CUDA graph serves a batch, how graphs are captured and replayed, one step of a model."""

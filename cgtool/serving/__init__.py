"""The serving runtime: capture a model as CUDA graphs, choose a graph for each batch, and run serving steps."""

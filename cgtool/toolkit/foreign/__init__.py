"""Readers for the caches of other systems: vLLM, ATOM, torch, Triton, mega-cache files. Must not import torch.

`detect` recognizes the system that wrote a folder or a file by its contents. Readers change, unpickle and execute
nothing. They match Python literals to a strict grammar before parsing them, limit the size of JSON and binary formats,
and do not follow links. A malformed file becomes a warning or a problem, never an error. The module that reads a format
describes it in its docstring.
"""

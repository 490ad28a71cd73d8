"""Readers for the caches of other systems: vLLM, ATOM, torch, Triton, a mega-cache file. Must not import torch.

Which system wrote a folder or a file is found by looking at it (`detect`). Reading changes nothing, unpickles nothing
and executes nothing: Python literals are matched to a grammar of literals first, JSON and binary formats have limits,
links are not followed, and what breaks a format becomes a warning or a problem and never an error. The formats are
described at the heads of the modules that read them.
"""

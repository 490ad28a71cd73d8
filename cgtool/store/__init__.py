"""The cache: a directory of compiled pieces that survives kills, copies and other processes. Imports no torch.

What goes wrong with a file is a `CacheError` that names it, from every function of this room: it cannot be read,
written or removed. It is a `CacheCorruptError` where the file is there and torn, is another's, or differs from its
digest, and a `CacheSchemaError` where another version of cgtool wrote it. Docstrings name what else there may be.
"""

"""The cache: a directory of compiled pieces that survives kills, copies and concurrent processes. Imports no torch.

Every function in this package raises `CacheError`, which names the file, if a file cannot be read, written or removed;
`CacheCorruptError` if a file is truncated, belongs elsewhere or does not match its digest; and `CacheSchemaError` if
another version of cgtool wrote it. Docstrings list only the errors beyond these.
"""

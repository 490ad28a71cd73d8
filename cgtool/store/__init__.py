"""The cache: a directory of compiled pieces that survives kills, copies and other processes. Imports no torch."""

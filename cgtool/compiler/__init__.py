"""Compiling pieces: adaptors to torch's compilers, and the manager that compiles each unique piece once."""

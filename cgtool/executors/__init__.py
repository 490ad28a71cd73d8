"""Compiling on other machines with a `concurrent.futures.Executor` that is selected by URL, and the workers' code."""

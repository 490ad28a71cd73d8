"""Benchmarks ways to start a model, each start in a fresh process."""

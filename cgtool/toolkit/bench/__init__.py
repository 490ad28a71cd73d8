"""Measures ways to start a model, each start in a fresh process: what a user would gain."""

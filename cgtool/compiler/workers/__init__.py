"""Compile workers: units of compile work as files, the processes that do them, and the pool that feeds those."""

"""Other machines to compile on: any `concurrent.futures.Executor`, found by its URL, and what runs there for a unit."""

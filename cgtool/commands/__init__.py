"""One module per command: options in, a report object out. Floor 5; prints nothing; importable without torch."""

"""What is done to a cache: options in, a record out. Floor 5; prints nothing; importable without torch."""

"""A piece's graph as data: names of targets, encoded values, expressions over symbols. Torch alone."""

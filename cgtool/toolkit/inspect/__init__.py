"""Looking into the cache: its entries, and the pieces, key, graph or an artifact of one. Importable without torch."""

"""The plan of an entry as data: stitched programs, graphs of pieces, and shapes. Floor 0; must not import torch."""

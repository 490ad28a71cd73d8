"""The command line: parse, print, exit codes. Floor 6; must not import torch."""

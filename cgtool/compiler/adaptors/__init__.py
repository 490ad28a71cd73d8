"""The compilers of pieces, behind one interface."""

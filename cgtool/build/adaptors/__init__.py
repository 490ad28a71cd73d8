"""The compilers that a piece can be given to, one module each, behind one interface."""

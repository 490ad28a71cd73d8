"""The compilers that a piece can be given to, behind one interface."""

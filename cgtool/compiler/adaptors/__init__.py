"""The compilers that a piece can be given to, one module each, behind one interface."""

from cgtool.compiler.adaptors.interface import CompiledPiece, CompilerInterface, PieceCallable, get_adaptor

__all__ = ["CompiledPiece", "CompilerInterface", "PieceCallable", "get_adaptor"]

"""Proof: an artifact is run in a child process before a manifest names it. Must not import Dynamo or Inductor."""

from cgtool.compiler.proof.prover import ProofRecord, Prover
from cgtool.errors import ProofCrashError, ProofMismatchError

__all__ = ["ProofCrashError", "ProofMismatchError", "ProofRecord", "Prover"]

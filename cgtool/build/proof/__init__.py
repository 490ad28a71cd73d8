"""Proof: an artifact is run in a child process before a manifest names it. Must not import Dynamo or Inductor."""

from cgtool.build.proof.prover import Prover
from cgtool.build.proof.record import ProofRecord
from cgtool.errors import ProofCrashError, ProofMismatchError

__all__ = ["ProofCrashError", "ProofMismatchError", "ProofRecord", "Prover"]

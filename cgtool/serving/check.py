"""Check that a model gives correct results from CUDA graphs, by running it as a server would under harsh conditions.

Pads and all KV cache blocks that no sequence owns hold NaN. Graphs are replayed in random order. Outputs of earlier
replays are kept and compared again at the end. Counters show whether anything was compiled or captured during replays.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import GraphError
from cgtool.host import counters
from cgtool.serving.batch import Request
from cgtool.serving.forward_context import BatchDescriptor
from cgtool.serving.runner import ModelRunner

Fault = Literal["pads", "differs", "overwritten", "made", "refused"]

_NAN = float("nan")


@dataclass(frozen=True, kw_only=True)
class Finding:
    """One fault.

    Attributes:
        fault: "pads": pads affect real rows. "differs": a replay is not bitwise equal to the same batch without graphs.
            "overwritten": an output changed after it was returned. "made": something was traced, compiled, opened or
            captured after warm-up. "refused": a graph could not be replayed because an input or a weight moved.
        sentence: A description of the fault.
        mode: The mode of the graph; None if the fault does not concern a single graph.
        num_tokens: The number of tokens of the graph, including pads; None as for `mode`.
    """

    fault: Fault
    sentence: str
    mode: CUDAGraphMode | None = None
    num_tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class CheckRecord:
    """The result of a check.

    Attributes:
        mode: The CUDA graph mode.
        num_keys: The number of keys that were checked; each has one graph, or one per piece.
        num_replays: The number of steps that ran from graphs.
        findings: The faults, each once per graph.
    """

    mode: CUDAGraphMode
    num_keys: int
    num_replays: int
    findings: tuple[Finding, ...]

    @property
    def may_be_served(self) -> bool:
        """True if the check found no fault."""
        return not self.findings


@dataclass(frozen=True, kw_only=True)
class _Case:
    """A batch for one key, with pads unless the key is the smallest, and its output without graphs."""

    mode: CUDAGraphMode
    descriptor: BatchDescriptor
    requests: tuple[Request, ...]
    expected: torch.Tensor


def check_model(
    runner: ModelRunner,
    *,
    vocab_size: int,
    embeddings: Sequence[nn.Embedding] = (),
    num_rounds: int = 3,
    seed: int = 0,
) -> CheckRecord:
    """Run every captured key of a runner in random order and report faults.

    Overwrites the KV caches. While the check runs, also overwrites the row of the pad token in `embeddings`.

    Args:
        runner: The runner; its graphs are captured if they are not yet. Its model must return one tensor with a row
            per token.
        vocab_size: The vocabulary size. Requests use all tokens except the pad token.
        embeddings: The embeddings of token ids, in which the pad token's row is set to NaN.
        num_rounds: The number of replays of each key.
        seed: The seed for batches and their order.
    """
    if not runner.dispatcher.enabled:
        runner.capture()
    rng = random.Random(seed)  # noqa: S311 - test traffic, not a secret
    found: dict[tuple[Fault, CUDAGraphMode | None, int | None], Finding] = {}

    def note(fault: Fault, sentence: str, case: _Case | None = None) -> None:
        mode, num_tokens = (None, None) if case is None else (case.mode, case.descriptor.num_tokens)
        finding = Finding(fault=fault, sentence=sentence, mode=mode, num_tokens=num_tokens)
        found.setdefault((fault, mode, num_tokens), finding)

    with _nan_pads(runner, embeddings), _full_checks(runner):
        keys = list(runner.dispatcher.keys())
        cases = [_case(runner, mode, key, vocab_size, rng) for mode, key in keys]
        before, num_replays = counters(), 0
        held: list[tuple[_Case, torch.Tensor, torch.Tensor]] = []
        order = cases * num_rounds
        rng.shuffle(order)
        for case in order:
            try:
                actual = _run(runner, case.requests, case.mode, case.descriptor)
            except GraphError as error:
                note("refused", str(error), case)
                continue
            num_replays += 1
            held.append((case, actual, actual.clone()))
            plain = _run(runner, case.requests, CUDAGraphMode.NONE, BatchDescriptor(len(actual)))
            if (actual.isnan() & ~plain.isnan()).any() or (case.expected.isnan() & ~plain.isnan()).any():
                note("pads", "A real row holds NaN from pads or from blocks that no sequence owns.", case)
            elif not _same_bits(actual, case.expected):
                note("differs", "A replay is not bitwise equal to the same padded batch without graphs.", case)
        for case, actual, original in held:
            if not _same_bits(actual, original):
                note("overwritten", "A later replay overwrote an output that was still in use.", case)
        made = {name: n - before[name] for name, n in counters().items() if name != "replays" and n != before[name]}
        if made:
            counts = ", ".join(f"{count} {name}" for name, count in sorted(made.items()))
            note("made", f"After warm-up, requests caused {counts}.")
    return CheckRecord(
        mode=runner.dispatcher.mode,
        num_keys=len(cases),
        num_replays=num_replays,
        findings=tuple(found.values()),
    )


def _case(
    runner: ModelRunner, mode: CUDAGraphMode, descriptor: BatchDescriptor, vocab_size: int, rng: random.Random
) -> _Case:
    limits = runner.limits
    num_seqs = min(descriptor.num_reqs or limits.max_num_seqs, limits.max_num_seqs, descriptor.num_tokens)
    if descriptor.uniform:
        num_seqs = max(1, num_seqs - 1)
        lens = [limits.uniform_query_len] * num_seqs
    else:
        num_tokens = max(num_seqs, descriptor.num_tokens - 1)
        lens = [num_tokens // num_seqs + (row < num_tokens % num_seqs) for row in range(num_seqs)]
    num_blocks = [len(cache.keys) - 1 for cache in runner.kv_caches.values()]
    room = min([limits.max_seq_len, *(blocks // num_seqs * limits.block_size for blocks in num_blocks)])
    requests, block = [], 1
    for length in [min(length, room) for length in lens]:
        computed = rng.randrange(room - length + 1)
        needed = -(-(computed + length) // limits.block_size)
        drawn = [rng.randrange(vocab_size - 1) for _ in range(length)]
        tokens = [token + (token >= runner.pad_token_id) for token in drawn]  # skips the pad token
        blocks = list(range(block, block + needed))
        requests.append(Request(token_ids=tokens, num_computed=computed, blocks=blocks))
        block += needed
    expected = _run(runner, requests, CUDAGraphMode.NONE, descriptor)
    return _Case(mode=mode, descriptor=descriptor, requests=tuple(requests), expected=expected)


def _run(
    runner: ModelRunner, requests: Sequence[Request], mode: CUDAGraphMode, descriptor: BatchDescriptor
) -> torch.Tensor:
    """Run a batch over a KV cache in which the sequences' blocks hold numbers and all others NaN."""
    num_used = 1 + max(block for request in requests for block in request.blocks)
    for layer, cache in enumerate(runner.kv_caches.values()):
        for offset, stored in enumerate((cache.keys, cache.values)):
            numbers = torch.arange(stored[1:num_used].numel(), device=stored.device, dtype=torch.float32)
            stored.fill_(_NAN)
            stored[1:num_used] = (numbers + layer + offset).sin().to(stored.dtype).view_as(stored[1:num_used])
    output: torch.Tensor = runner.execute(requests, mode, descriptor)
    return output


@contextlib.contextmanager
def _nan_pads(runner: ModelRunner, embeddings: Sequence[nn.Embedding]) -> Iterator[None]:
    pad = runner.pad_token_id
    kept = [embedding.weight[pad].detach().clone() for embedding in embeddings]
    with torch.no_grad():
        for embedding in embeddings:
            embedding.weight[pad] = _NAN
    try:
        yield
    finally:
        with torch.no_grad():
            for embedding, row in zip(embeddings, kept, strict=True):
                embedding.weight[pad] = row


@contextlib.contextmanager
def _full_checks(runner: ModelRunner) -> Iterator[None]:
    """Enable full checks of inputs at each replay."""
    wrappers = runner.model.wrappers
    before = [wrapper.debug for wrapper in wrappers]
    for wrapper in wrappers:
        wrapper.debug = True
    try:
        yield
    finally:
        for wrapper, debug in zip(wrappers, before, strict=True):
            wrapper.debug = debug


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return left.shape == right.shape and bool(((left == right) | (left.isnan() & right.isnan())).all())

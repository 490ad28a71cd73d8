"""One serving step, from a batch to its result: describe, dispatch, prepare, run, slice.

A reference for integrators: it shows what a server does around a model from `cgtool.load`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from cgtool.config import CompilationConfig, resolve_capture_sizes
from cgtool.config_values import CompilationLevel, CUDAGraphMode
from cgtool.errors import UsageError
from cgtool.events import OnEvent, ignore
from cgtool.serving.batch import BatchLimits, InputBuffers, Request
from cgtool.serving.capture import CaptureReport, capture_cudagraphs
from cgtool.serving.dispatcher import CudagraphDispatcher
from cgtool.serving.forward_context import (
    BatchDescriptor,
    Context,
    DPMetadata,
    ForwardContext,
    set_forward_context,
)
from cgtool.serving.graphs import CudaGraphs, GraphBackend
from cgtool.serving.model import GraphedModel, PiecewiseModel
from cgtool.serving.modes import AttentionCGSupport, resolve_cudagraph_mode
from cgtool.serving.sizes import check_compile_sizes, fit_sizes
from cgtool.serving.tensors import map_tensors

#: Sends a few integers to every data-parallel rank and returns the integers of all ranks, by rank.
Gather = Callable[[tuple[int, ...]], Sequence[tuple[int, ...]]]


class ModelRunner:
    """Runs batches of a decoder over a paged KV cache.

    Args:
        model: A model from `cgtool.load`, or any other callable. Takes (input ids [T], positions [T]); its layers read
            their attention metadata and KV cache from the forward context.
        limits: The maximum size of batches.
        config: Which graphs are captured, and whether inputs are copied; None means the defaults.
        kv_caches: The KV cache of each layer, by the layer's name.
        supports: The support of each of the model's attention backends for FULL graphs.
        device: The device of the model.
        backend: The graph backend; None means CUDA graphs on a CUDA `device`, and no graphs on other devices.
        context_sizes: Token counts to capture for batches other than decode batches; None means the sizes of decode
            batches. `cgtool.serving.sizes` has the lists of vLLM and TensorRT-LLM.
        enable_padding: Whether a batch is padded to the next captured size.
        lora_counts: The numbers of active adapters for which graphs are captured.
        strict: Raise for sizes that no batch can have, instead of dropping them.
        lend_outputs: Return tensors that a later step may overwrite.
        capture_on_demand: Capture a missing graph when a request needs it, instead of raising.
        debug: Check inputs fully at each replay.
        pad_token_id: The token id of pads.
        rank: Only rank 0 reports progress.
        gather: Exchanges data with the other data-parallel ranks in each step; None without data parallelism.

    Raises:
        UsageError: The configuration cannot be served; the message says what to change.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        limits: BatchLimits,
        config: CompilationConfig | None = None,
        kv_caches: Mapping[str, Any],
        supports: Sequence[AttentionCGSupport] = (AttentionCGSupport.UNIFORM_BATCH,),
        device: torch.device,
        backend: GraphBackend | None = None,
        context_sizes: Iterable[int] | None = None,
        enable_padding: bool = True,
        lora_counts: Iterable[int] = (0,),
        strict: bool = False,
        lend_outputs: bool = False,
        capture_on_demand: bool = False,
        debug: bool = False,
        pad_token_id: int = 0,
        rank: int = 0,
        gather: Gather | None = None,
    ) -> None:
        config = CompilationConfig() if config is None else config
        self.limits = limits
        self.kv_caches = kv_caches
        self.pad_token_id = pad_token_id
        self.capture_on_demand = capture_on_demand
        self._rank = rank
        self._gather = gather
        self._lock = threading.Lock()
        has_pieces = isinstance(model, PiecewiseModel) and config.effective_level != CompilationLevel.NO_COMPILATION
        resolved = resolve_cudagraph_mode(
            config.asked_cudagraph_mode,
            supports,
            has_pieces=has_pieces,
            attention_is_split=has_pieces and config.leveled().splitting_ops != (),
            uniform_query_len=limits.uniform_query_len,
            can_capture=backend is not None or device.type == "cuda",
        )
        #: Why the mode differs from the requested one: a sentence for each step.
        self.mode_reasons = resolved.reasons
        self.dispatcher = _dispatcher(
            resolved.mode,
            config,
            limits=limits,
            context_sizes=context_sizes,
            enable_padding=enable_padding,
            lora_counts=lora_counts,
            strict=strict,
        )
        self.dispatcher.enabled = capture_on_demand  # otherwise no graph exists before `capture`
        self.model = GraphedModel(
            model,
            backend=CudaGraphs(device) if backend is None else backend,
            piecewise=resolved.mode.has_piecewise_cudagraphs(),
            lend_outputs=lend_outputs,
            copy_inputs=config.cudagraph_copy_inputs,
            debug=debug,
        )
        largest = max((*self.dispatcher.sizes, *self.dispatcher.decode_sizes), default=0)
        self._inputs = InputBuffers(limits, largest, device, pad_token_id)

    def capture(self, *, num_warmups: int = 1, on_event: OnEvent = ignore) -> CaptureReport:
        """Capture all graphs. Call this once at start-up, and again after `sleep`.

        Raises:
            GraphError: A capture failed.
        """
        with self._lock:
            return capture_cudagraphs(
                self.model,
                self.dispatcher,
                self._dummy_run,
                num_warmups=num_warmups,
                rank=self._rank,
                on_event=on_event,
            )

    def sleep(self) -> None:
        """Free the memory of all graphs. Steps run without graphs until `capture` is called again."""
        with self._lock:
            self.dispatcher.enabled = False
            self.model.clear()

    def run(self, requests: Sequence[Request], *, num_active_loras: int = 0, cascade: bool = False) -> Any:
        """Run one step and return the model's output for the tokens of `requests`, in order, without pads.

        Args:
            requests: The batch; empty if only other data-parallel ranks have work.
            num_active_loras: The number of adapters that the sequences use.
            cascade: Whether attention runs as cascade attention, which FULL graphs do not support.

        Raises:
            UsageError: The batch exceeds the limits.
            GraphError: A graph cannot be replayed for the batch.
        """
        with self._lock:
            if any(0 in request.blocks for request in requests):
                msg = "Block 0 of the KV cache is reserved for pads. Assign blocks from 1 to sequences."
                raise UsageError(msg)
            num_tokens, uniform = self._describe(requests)
            mode, descriptor, across = self._dispatch(num_tokens, uniform, num_active_loras, cascade=cascade)
            if mode is CUDAGraphMode.NONE and requests:  # without a graph, attention handles the batch as it is
                descriptor = descriptor._replace(uniform=uniform)
            return self.execute(requests, mode, descriptor, dp_metadata=across)

    def execute(
        self,
        requests: Sequence[Request],
        mode: CUDAGraphMode,
        descriptor: BatchDescriptor,
        *,
        dp_metadata: DPMetadata | None = None,
        capturing: bool = False,
    ) -> Any:
        """Run a dispatched batch under `mode`, padded to `descriptor`."""
        num_tokens, uniform = self._describe(requests)
        input_ids, positions, metadata = self._inputs.fill(requests, descriptor)
        context = Context(
            positions=positions,
            is_prefill=not uniform,
            batch_size=len(requests),
            graph_bs=metadata.seq_lens.shape[0],
        )
        step = ForwardContext(
            attn_metadata=metadata,
            kv_cache_data=self.kv_caches,
            context=context,
            dp_metadata=dp_metadata,
            batch_descriptor=descriptor,
            cudagraph_runtime_mode=mode,
            capturing=capturing or self.capture_on_demand,
        )
        with set_forward_context(step), torch.no_grad():
            output = self.model(input_ids, positions)
        padded = descriptor.num_tokens
        return map_tensors(lambda t: t[:num_tokens] if t.dim() and len(t) == padded else t, output)

    def _describe(self, requests: Sequence[Request]) -> tuple[int, bool]:
        """Return the number of tokens in a batch, and whether it is a uniform decode batch."""
        lens = [len(request.token_ids) for request in requests]
        num_tokens = sum(lens)
        if len(lens) > self.limits.max_num_seqs or num_tokens > self.limits.max_num_tokens:
            msg = (
                f"A batch of {len(lens)} sequences and {num_tokens} tokens exceeds max_num_seqs "
                f"{self.limits.max_num_seqs} or max_num_tokens {self.limits.max_num_tokens}. Split the batch, or raise "
                "the limits."
            )
            raise UsageError(msg, actual=(len(lens), num_tokens))
        return num_tokens, all(length == self.limits.uniform_query_len for length in lens)

    def _dispatch(
        self, num_tokens: int, uniform: bool, num_active_loras: int, *, cascade: bool
    ) -> tuple[CUDAGraphMode, BatchDescriptor, DPMetadata | None]:
        most = CUDAGraphMode.PIECEWISE if cascade else CUDAGraphMode.FULL
        mode, descriptor = self.dispatcher.dispatch(
            num_tokens, uniform=uniform, num_active_loras=num_active_loras, most=most
        )
        if self._gather is None:
            return mode, descriptor, None
        # A rank without work runs in the mode of the others.
        highest = CUDAGraphMode.FULL if num_tokens == 0 else mode
        ranks = self._gather((num_tokens, int(uniform), highest.value))
        lowest = CUDAGraphMode(min(value for _, _, value in ranks))
        largest = max(tokens for tokens, _, _ in ranks)
        mode, descriptor = self.dispatcher.dispatch(
            largest,
            uniform=all(flag for _, flag, _ in ranks),
            num_active_loras=num_active_loras,
            most=lowest,
        )
        if mode is CUDAGraphMode.NONE:  # each rank runs unpadded; one without work runs a pad, to join collectives
            counts = [max(tokens, 1) for tokens, _, _ in ranks]
            return mode, BatchDescriptor(max(num_tokens, 1)), DPMetadata(counts)
        return mode, descriptor, DPMetadata([descriptor.num_tokens] * len(ranks))

    def _dummy_run(self, mode: CUDAGraphMode, descriptor: BatchDescriptor, capturing: bool) -> None:
        """Run a batch of the size of `descriptor` whose tokens are all in block 0."""
        requests = []
        if not descriptor.uniform:  # in a uniform batch, pads are sequences; in others, use prompts to run attention
            longest = self.limits.max_seq_len
            lens = [min(longest, descriptor.num_tokens - begin) for begin in range(0, descriptor.num_tokens, longest)]
            blocks = [0] * self.limits.max_blocks
            requests = [
                Request(token_ids=[self.pad_token_id] * length, num_computed=0, blocks=blocks)
                for length in lens[: self.limits.max_num_seqs]
            ]
        self.execute(requests, mode, descriptor, capturing=capturing)


def _dispatcher(
    mode: CUDAGraphMode,
    config: CompilationConfig,
    *,
    limits: BatchLimits,
    context_sizes: Iterable[int] | None,
    enable_padding: bool,
    lora_counts: Iterable[int],
    strict: bool,
) -> CudagraphDispatcher:
    """Return the dispatcher for the sizes of a configuration, which are in sequences of a decode batch."""
    query_len = limits.uniform_query_len
    if mode is CUDAGraphMode.NONE:
        return CudagraphDispatcher(mode, (), max_num_seqs=limits.max_num_seqs, uniform_query_len=query_len)
    batches = fit_sizes(
        resolve_capture_sizes(config),
        max_num_seqs=limits.max_num_seqs,
        max_num_tokens=limits.max_num_tokens,
        uniform_query_len=query_len,
        strict=strict,
    )
    decode_sizes = [size * query_len for size in batches]
    sizes = decode_sizes if context_sizes is None else sorted(context_sizes)
    check_compile_sizes([size for size in config.compile_sizes or () if isinstance(size, int)], sizes)
    return CudagraphDispatcher(
        mode,
        sizes,
        max_num_seqs=limits.max_num_seqs,
        uniform_query_len=query_len,
        decode_sizes=decode_sizes,
        lora_counts=lora_counts,
        enable_padding=enable_padding,
    )


def gather_over(group: Any) -> Gather:
    """Return a `Gather` over a process group of torch.distributed with CPU tensors, such as a gloo group."""
    from torch import distributed  # imported lazily: only needed with several ranks

    def gather(values: tuple[int, ...]) -> list[tuple[int, ...]]:
        sent = torch.tensor(values)
        received = [torch.empty_like(sent) for _ in range(distributed.get_world_size(group))]
        distributed.all_gather(received, sent, group=group)
        return [tuple(item.tolist()) for item in received]

    return gather

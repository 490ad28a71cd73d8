"""The default splitting ops: known attention ops, collectives, and the ops registered here.

Owns the registry behind `splitting=True`, and the grammar of op names. Must not import torch, because the configuration
and the command line handle op names. Names::

    op      = ns "::" name | ns "::" name "." overload       a custom op or an ATen op
    op      = ident ("." ident)+                             a Python function that a Dynamo graph calls, dotted

A user may write `ns.name` for `ns::name`; the ambiguity is resolved when names are matched with a graph.
"""

from __future__ import annotations

import re
from typing import Final

from cgtool.errors import UsageError
from cgtool.threads import ForkedLock

#: Namespaces of torch's own ops, which torch's version identifies.
TORCH_NAMESPACES: Final = frozenset(
    {
        *("aten", "prim", "prims", "debugprims", "rngprims", "higher_order", "inductor", "profiler", "static_runtime"),
        *("quantized", "quantized_decomposed", "_quantized", "sparse", "xnnpack", "prepacked", "streams"),
        *("mkl", "mkldnn", "mkldnn_prepacked", "onednn", "symm_mem", "_inductor_test", "cuda", "export"),
        *("_native", "_test", "debug_mode_ops", "inductor_prims", "onnx", "quantization"),
        *("c10d", "_c10d_functional", "_c10d_functional_autograd", "c10d_functional", "_dtensor", "fsdp"),
    }
)
#: Attention ops, and ops that use attention metadata (state-space mixers, KV-cache writes, sparse indexers), as their
#: projects name them. Ops that a graph does not contain are ignored.
KNOWN_ATTENTION_OPS: Final[tuple[str, ...]] = (
    # torch: Dynamo puts the builtin, which has two names, into the graph
    "torch.nn.functional.scaled_dot_product_attention",
    "torch._C._nn.scaled_dot_product_attention",
    "aten::scaled_dot_product_attention",
    "aten::_scaled_dot_product_attention_math",
    "aten::_scaled_dot_product_flash_attention",
    "aten::_scaled_dot_product_flash_attention_for_cpu",
    "aten::_scaled_dot_product_efficient_attention",
    "aten::_scaled_dot_product_cudnn_attention",
    "aten::_scaled_dot_product_fused_attention_overrideable",
    "aten::_flash_attention_forward",
    "aten::_efficient_attention_forward",
    # ATOM
    "aiter::unified_attention",
    "aiter::unified_attention_with_output",
    "aiter::mla_attention",
    # vLLM
    "vllm::unified_attention",
    "vllm::unified_attention_with_output",
    "vllm::unified_mla_attention",
    "vllm::unified_mla_attention_with_output",
    "vllm::unified_kv_cache_update",
    "vllm::unified_mla_kv_cache_update",
    "vllm::mamba_mixer",
    "vllm::mamba_mixer2",
    "vllm::plamo2_mamba_mixer",
    "vllm::short_conv",
    "vllm::linear_attention",
    "vllm::gdn_attention_core",
    "vllm::kda_attention",
    "vllm::sparse_attn_indexer",
    "vllm::rocm_aiter_sparse_attn_indexer",
    # TensorRT-LLM
    "trtllm::attn_custom_op_inplace",
    "trtllm::mla_custom_op_inplace",
    # sglang
    "sglang::unified_attention_with_output",
    # flash-attention 2 and 3
    "flash_attn::_flash_attn_forward",
    "flash_attn::_flash_attn_varlen_forward",
    "flash_attn_3::fwd",
    "flash_attn_3::_flash_attn_forward",
)

#: Collectives as Dynamo puts them into a graph. They run between pieces, as in eager mode: inside native packages, two
#: collectives of one call were seen to deadlock on the CPU.
COLLECTIVE_OPS: Final[tuple[str, ...]] = tuple(
    f"{namespace}::{name}"
    for namespace in ("_c10d_functional", "_c10d_functional_autograd")
    for name in (
        *("all_reduce", "all_reduce_", "all_reduce_coalesced", "all_reduce_coalesced_", "broadcast", "broadcast_"),
        *("all_gather_into_tensor", "all_gather_into_tensor_out", "all_gather_into_tensor_coalesced"),
        *("reduce_scatter_tensor", "reduce_scatter_tensor_out", "reduce_scatter_tensor_coalesced"),
        *("all_to_all_single", "wait_tensor"),
    )
)

_OP_NAME = r"[A-Za-z_]\w*::[A-Za-z_]\w*(\.[A-Za-z_]\w*)?|[A-Za-z_]\w*(\.[A-Za-z_]\w*)+"

_registered: dict[str, None] = {}
_lock = ForkedLock()


def register_splitting_op(name: str) -> None:
    """Register an op to split graphs at when `splitting_ops` is None. Registering it again has no effect.

    Args:
        name: `ns::op` or `ns.op`, with or without overload, or the dotted name of a Python function.

    Raises:
        UsageError: `name` has none of these forms.
    """
    if not re.fullmatch(_OP_NAME, name, re.ASCII):
        msg = (
            f"{name!r} is not the name of an op. Write ns::op (a custom op or an ATen op, with or without .overload) "
            "or the dotted name of a Python function."
        )
        raise UsageError(msg, expected="ns::op", actual=name)
    with _lock:
        _registered[name] = None


def registered_splitting_ops() -> tuple[str, ...]:
    """Return the registered names, in order of registration."""
    with _lock:
        return tuple(_registered)


def is_torch_op(name: str) -> bool:
    """Return whether the op `ns::op` is part of torch itself."""
    return name.partition("::")[0] in TORCH_NAMESPACES

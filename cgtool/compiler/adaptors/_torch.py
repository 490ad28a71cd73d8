"""The private torch names that adaptors use. Verified with torch 2.13.0, written for 2.11 and newer.

Inductor is imported inside functions: it takes seconds, and the `eager` adaptor does not need it. Patches of torch last
as long as a `with` block.
"""

from __future__ import annotations

import contextlib
import importlib
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any
from unittest import mock

import torch
import torch.compiler.config
from torch import fx
from torch._subclasses.fake_tensor import FakeTensorMode

from cgtool.compiler._torch import inductor_options
from cgtool.graph.targets import PYTHON_FUNCTIONS
from cgtool.threads import ForkedLock

#: Overrides of the user's settings for every compile: results can be saved, and come from this machine only.
_CACHING = {
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    # their results depend only on their arguments, which are part of the graph; torch's caches do not know that
    "unsafe_marked_cacheable_functions": dict.fromkeys(sorted(PYTHON_FUNCTIONS), "cgtool"),
}
#: Held while classes of Inductor are patched.
_patching = ForkedLock()


@contextlib.contextmanager
def compiling(tag: str) -> Iterator[None]:
    """Set torch up for a compile or a load through `compile_fx`; different tags share nothing in torch's caches."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    compiler_config: Any = torch.compiler.config
    shape_config: Any = importlib.import_module("torch.fx.experimental._config")
    with (
        torch.no_grad(),
        compiler_config.patch(cache_key_tag=tag, force_disable_caches=False),
        # makes torch prefer code for all sizes to faster code for some sizes: else a piece would get a size limit that
        # depends on the example sizes, such as 8 * s0 <= 4096
        shape_config.patch(backed_size_oblivious=True),
        inductor_config.patch(_CACHING),
        functorch_config.patch(
            {"enable_autograd_cache": True, "enable_remote_autograd_cache": False, "strict_autograd_cache": True}
        ),
    ):
        yield


@contextlib.contextmanager
def checks_that_raise() -> Iterator[None]:
    """Make every failed check in generated C++ raise an exception in the caller.

    Loops with checks are generated for one thread, because an error in an OpenMP loop ends the process. For ATen's
    scatter, Inductor ignores the error code, and the call would return memory that was never written.

    Only one thread can be in this block at a time; other compiles of this process are affected meanwhile.
    """
    from torch._inductor import config
    from torch._inductor.codegen import cpp, cpp_wrapper_cpu

    kernel: Any = cpp.CppKernel
    wrapper: Any = cpp_wrapper_cpu.CppWrapperCpu
    write_scatter = wrapper._generate_scatter_fallback

    def checked_scatter(self: Any, *args: Any) -> None:
        write = self.writeline

        def write_checked(call: str) -> None:
            is_checked = call.startswith("AOTI_TORCH_ERROR_CODE_CHECK")  # from 2.15
            write(call if is_checked else f"AOTI_TORCH_ERROR_CODE_CHECK({call.removesuffix(';')});")

        with mock.patch.object(self, "writeline", write_checked):
            write_scatter(self, *args)

    def marking(write_check: Callable[..., Any]) -> Callable[..., Any]:
        def marked(self: Any, *args: Any) -> Any:
            self.may_raise = True
            return write_check(self, *args)

        return marked

    with _patching:
        write_loops = kernel.codegen_loops_impl

        def write_loops_for_one_thread(self: Any, nest: Any, code: Any, sharing: Any) -> Any:
            fused = getattr(nest.kernel, "inner", [nest])
            if not any(hasattr(body, "may_raise") for loops in fused for body in loops.kernel.kernels):
                return write_loops(self, nest, code, sharing)
            sharing.close()
            with config.patch({"cpp.threads": 1, "cpp.dynamic_threads": False}):
                return write_loops(self, nest, code, sharing)

        with (
            mock.patch.multiple(
                kernel,
                assert_function=property(marking(kernel.assert_function.fget)),  # read whenever a check is generated
                device_assert_async=marking(kernel.device_assert_async),
                codegen_loops_impl=write_loops_for_one_thread,
            ),
            mock.patch.object(wrapper, "_generate_scatter_fallback", checked_scatter),
        ):
            yield


def standalone(module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any]) -> Any:
    """Compile through `standalone_compile` into one self-contained callable."""
    from torch._inductor.standalone_compile import standalone_compile

    more: dict[str, Any] = {}
    if "donate_graph_module" in inspect.signature(standalone_compile).parameters:  # from 2.13
        more["donate_graph_module"] = True
    return standalone_compile(
        module,
        list(inputs),
        dynamic_shapes="from_graph",
        options={"config_patches": dict(patches)},
        aot=True,
        **more,
    )


def forget_origin(artifact: Any) -> None:
    """Remove traces of this process from a standalone artifact: a repro script with its environment, and timings.

    A load does not read them; they would leak variables and paths of this machine.
    """
    entry = artifact.inner_fn.compiled_fn.serialize()
    for name in ("forward_time_taken_ns", "backward_time_taken_ns"):
        if hasattr(entry, name):
            setattr(entry, name, 0)
    result: Any = getattr(entry.compiled_fw, "result", None)
    for name in ("runnable_graph_str", "inductor_post_grad_graph_str"):
        if hasattr(result, name):
            setattr(result, name, "")
    if hasattr(result, "_time_taken_ns"):
        result._time_taken_ns = 0


def load_standalone(path: str) -> Callable[..., Any]:
    """Open what `standalone(...).save(path=..., format="binary")` wrote.

    Raises:
        AssertionError: The artifact was written by a different build of torch.
    """
    from torch._inductor.standalone_compile import CompiledArtifact

    return CompiledArtifact.load(path=path, format="binary")


def has_torch_key(data: bytes) -> bool:
    """Return whether a standalone artifact was written by this build of torch."""
    from torch._inductor.codecache import torch_key
    from torch.utils._appending_byte_serializer import BytesReader

    reader = BytesReader(data)
    reader.read_bytes()
    return bool(reader.read_bytes() == torch_key())


def run_compile_fx(
    module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[Callable[..., Any], bytes | None]:
    """Compile through `compile_fx`; return the callable, and the new content of torch's caches as a mega-cache."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler._cache import CacheArtifactManager

    with tracing(TracingContext(mode)), CacheArtifactManager.with_fresh_cache():
        compiled: Any = compile_fx(module, list(inputs), config_patches=dict(patches))
        saved = torch.compiler.save_cache_artifacts()
    return compiled, None if saved is None else saved[0]


def load_compile_fx(
    data: bytes,
    module: fx.GraphModule,
    inputs: Sequence[Any],
    *,
    patches: Mapping[str, Any],
    mode: FakeTensorMode,
    refuse: Callable[..., Any],
) -> Callable[..., Any]:
    """Load a callable from a mega-cache through `compile_fx`; `refuse` replaces the compiler."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler._cache import CacheArtifactManager

    with tracing(TracingContext(mode)), CacheArtifactManager.with_fresh_cache():
        torch.compiler.load_cache_artifacts(data)
        loaded: Any = compile_fx(module, list(inputs), inner_compile=refuse, config_patches=dict(patches))
    return loaded  # type: ignore[no-any-return]  # only ahead-of-time compiles return files


def compile_aot(module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], *, folder: str) -> list[str]:
    """Compile through AOTInductor into `folder` and return the paths of the files."""
    from torch._inductor.compile_fx import compile_fx_aot

    # torch adds the device and the target to the metadata: pass a copy, so that they do not persist
    metadata = dict(inductor_options()["aot_inductor.metadata"])
    place = {"aot_inductor.package": True, "aot_inductor.output_path": folder, "aot_inductor.metadata": metadata}
    files: Any = compile_fx_aot(module, list(inputs), config_patches={**patches, **place})
    return [file for file in files if isinstance(file, str)]


def bypass_errors() -> tuple[type[Exception], ...]:
    """Return the errors that torch's caches raise for graphs that they cannot save."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.codecache import BypassFxGraphCache

    return (BypassAOTAutogradCache, BypassFxGraphCache)


def num_generated_kernels() -> int:
    """Return how many kernels Inductor has generated in this process."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)

"""Every private torch name that adaptors touch. Read in torch 2.13.0, written for 2.11 and newer.

Inductor is imported inside functions: it takes seconds, and the `eager` adaptor does without. What is patched of torch
is as it was when the `with` block ends.
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

#: What every compile needs, whatever the user's settings: results that can be saved, from this machine alone.
_CACHING = {
    "fx_graph_cache": True,
    "fx_graph_remote_cache": False,
    "autotune_remote_cache": False,
    "bundled_autotune_remote_cache": False,
    # what they do is decided by their arguments, which are part of the graph; torch's caches do not know that
    "unsafe_marked_cacheable_functions": dict.fromkeys(sorted(PYTHON_FUNCTIONS), "cgtool"),
}
#: Held while a class of Inductor's is patched.
_writing = ForkedLock()


@contextlib.contextmanager
def compiling(tag: str) -> Iterator[None]:
    """Set up what every compile and every load through `compile_fx` runs under; no two tags share what torch caches."""
    import torch._functorch.config as functorch_config
    import torch._inductor.config as inductor_config

    compiler_config: Any = torch.compiler.config
    shape_config: Any = importlib.import_module("torch.fx.experimental._config")
    with (
        torch.no_grad(),
        compiler_config.patch(cache_key_tag=tag, force_disable_caches=False),
        # where torch may choose between code for all sizes and faster code for some, it takes the one for all: else a
        # piece would hold up to some size that follows from the example sizes, such as 8 * s0 <= 4096
        shape_config.patch(backed_size_oblivious=True),
        inductor_config.patch(_CACHING),
        functorch_config.patch(
            {"enable_autograd_cache": True, "enable_remote_autograd_cache": False, "strict_autograd_cache": True}
        ),
    ):
        yield


@contextlib.contextmanager
def checks_that_raise() -> Iterator[None]:
    """Have every check in generated C++ end a call with an exception.

    Loops that check what they read are written for one thread: in OpenMP's, an error ends the process. Of ATen's
    scatter, Inductor drops the error code, and what was never written would be the answer.

    One block runs at a time, and what is compiled elsewhere in this process meanwhile is written so, too.
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

    def noting(write_check: Callable[..., Any]) -> Callable[..., Any]:
        def noted(self: Any, *args: Any) -> Any:
            self.may_raise = True
            return write_check(self, *args)

        return noted

    with _writing:
        write_loops = kernel.codegen_loops_impl

        def written(self: Any, nest: Any, code: Any, sharing: Any) -> Any:
            fused = getattr(nest.kernel, "inner", [nest])
            if not any(hasattr(body, "may_raise") for one in fused for body in one.kernel.kernels):
                return write_loops(self, nest, code, sharing)
            sharing.close()
            with config.patch({"cpp.threads": 1, "cpp.dynamic_threads": False}):
                return write_loops(self, nest, code, sharing)

        with (
            mock.patch.multiple(
                kernel,
                assert_function=property(noting(kernel.assert_function.fget)),  # asked for as a check is written
                device_assert_async=noting(kernel.device_assert_async),
                codegen_loops_impl=written,
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
    """Blank what a standalone artifact says of this process: its environment in a repro script, its clock.

    Nothing reads these when the artifact is loaded; they would carry variables and paths of this machine to others.
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
        AssertionError: It was written by another build of torch.
    """
    from torch._inductor.standalone_compile import CompiledArtifact

    return CompiledArtifact.load(path=path, format="binary")


def has_torch_key(data: bytes) -> bool:
    """Return whether a standalone artifact was written by this very build of torch."""
    from torch._inductor.codecache import torch_key
    from torch.utils._appending_byte_serializer import BytesReader

    reader = BytesReader(data)
    reader.read_bytes()
    return bool(reader.read_bytes() == torch_key())


def run_compile_fx(
    module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], mode: FakeTensorMode
) -> tuple[Callable[..., Any], bytes | None]:
    """Compile through `compile_fx` and return the callable, and what torch's caches gained as a mega-cache."""
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
    """Take the callable out of a mega-cache through `compile_fx`; `refuse` stands in for the compiler."""
    from torch._guards import TracingContext, tracing
    from torch._inductor.compile_fx import compile_fx
    from torch.compiler._cache import CacheArtifactManager

    with tracing(TracingContext(mode)), CacheArtifactManager.with_fresh_cache():
        torch.compiler.load_cache_artifacts(data)
        loaded: Any = compile_fx(module, list(inputs), inner_compile=refuse, config_patches=dict(patches))
    return loaded  # type: ignore[no-any-return]  # only a compile ahead of time gives files instead


def compile_aot(module: fx.GraphModule, inputs: Sequence[Any], patches: Mapping[str, Any], *, folder: str) -> list[str]:
    """Compile through AOTInductor and return the paths of what it wrote into `folder`."""
    from torch._inductor.compile_fx import compile_fx_aot

    # torch notes the device and the target in the last one, which would stay set: its own dict, for this compile alone
    metadata = dict(inductor_options()["aot_inductor.metadata"])
    place = {"aot_inductor.package": True, "aot_inductor.output_path": folder, "aot_inductor.metadata": metadata}
    files: Any = compile_fx_aot(module, list(inputs), config_patches={**patches, **place})
    return [file for file in files if isinstance(file, str)]


def bypass_errors() -> tuple[type[Exception], ...]:
    """Return the errors with which torch's caches say that a graph cannot be saved."""
    from torch._functorch._aot_autograd.autograd_cache import BypassAOTAutogradCache
    from torch._inductor.codecache import BypassFxGraphCache

    return (BypassAOTAutogradCache, BypassFxGraphCache)


def num_generated_kernels() -> int:
    """Return how many kernels Inductor generated in this process so far."""
    from torch._inductor import metrics

    return int(metrics.generated_kernel_count)

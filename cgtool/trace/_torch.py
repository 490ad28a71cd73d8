"""Private names of torch that tracing needs.

As of torch 2.13.0; 2.11 and 2.15 have the same names unless a comment says otherwise. Importing this module imports
Dynamo.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import os
import sys
import traceback
import types
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch._dynamo as dynamo
import torch._refs
from torch._dynamo import source as dynamo_source
from torch._dynamo.exc import TorchDynamoException
from torch._dynamo.side_effects import AttributeMutationNew, ValueMutationNew
from torch._dynamo.symbolic_convert import InstructionTranslator, InstructionTranslatorBase
from torch._dynamo.variables.base import VariableTracker
from torch._dynamo.variables.lazy import LazyVariableTracker
from torch._dynamo.variables.torch_function import TorchFunctionModeStackVariable
from torch._guards import Source, TracingContext, detect_fake_mode, tracing
from torch._library.custom_ops import OPDEFS
from torch._library.fake_class_registry import FakeScriptObject
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily
from torch.fx.experimental import _config as shape_config
from torch.fx.experimental import proxy_tensor, symbolic_shapes
from torch.fx.experimental.symbolic_shapes import ConstraintViolationError
from torch.utils._python_dispatch import is_traceable_wrapper_subclass
from torch.utils._pytree import tree_leaves

from cgtool.graph._torch import share_storage
from cgtool.host import silenced

__all__ = [
    "ConstraintViolationError",
    "TorchDynamoException",
    "TracingContext",
    "detect_fake_mode",
    "dynamo_source",
    "is_traceable_wrapper_subclass",
    "tree_leaves",
    "unset_fake_temporarily",
]


#: The calls that Dynamo writes for an autocast region.
ENTER_AUTOCAST: Any = torch.amp.autocast_mode._enter_autocast
EXIT_AUTOCAST: Any = torch.amp.autocast_mode._exit_autocast
#: `torch.tensor` of numbers that are known only when the graph runs, and `x.data`, from torch 2.12 on.
TENSOR_OF_NUMBERS: Any = torch._refs.tensor
DATA_OF_TENSOR: Any = getattr(torch._C._autograd, "_get_data_attr", None)
#: Asserts that the single value of a tensor is not zero.
ASSERTION: Any = torch._assert_async


class NumpyArray:
    """Placeholder in a traced output for an array that Dynamo's bytecode creates from a tensor."""

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor


class _OwnFiles:
    """Contains all files of torch, so that a guard on sizes is attributed to the line of the model that caused it."""

    def __contains__(self, path: str) -> bool:
        return path.startswith(_TORCH)


_ABSENT = object()
#: Attributes in which a tensor records its marked dimensions.
_MARKS = (
    *("_dynamo_dynamic_indices", "_dynamo_dynamic_range", "_dynamo_hint_overrides"),
    *("_has_dynamo_dim_marking", "_specialize_on"),
)
#: Logging calls, which return nothing and are left out of graphs.
_LEVELS = ("debug", "info", "warning", "error", "critical", "exception", "log")
#: Dynamo's setting for functions to ignore; the older name became an alias of the newer one.
_IGNORED = "ignore_logging_functions" if hasattr(dynamo.config, "ignore_logging_functions") else "ignore_logger_methods"
_TORCH = str(Path(torch.__file__).parent) + os.sep


def current_output() -> Any:
    """Return Dynamo's OutputGraph of the frame that is being compiled; valid only inside a backend."""
    return InstructionTranslator.current_tx().output


def passed_through() -> list[tuple[Source, Any]]:
    """Return (source, value) of each plain value that the frame returns without reading it.

    Valid only inside a backend. Dynamo 2.13 keeps them unrealized (`LazyConstantVariable`), so they have no guard.
    """
    values: dict[int, tuple[Source, Any]] = {}

    def visit(variable: Any) -> None:
        if isinstance(variable, LazyVariableTracker) and not variable.is_realized() and variable.source is not None:
            values[id(variable)] = (variable.source, variable.peek_value())

    VariableTracker.visit(visit, list(InstructionTranslator.current_tx().stack))
    return list(values.values())


def is_of_numpy(source: Any) -> bool:
    """Return whether a source is a NumPy array or number, which Dynamo treats as a tensor."""
    return isinstance(source, dynamo_source.NumpyTensorSource)


def written_existing(output: Any) -> Iterator[tuple[Any, bool]]:
    """Yield (variable, changed) of Dynamo's variables for objects older than the call that the call writes to."""
    effects, modes = output.side_effects, output.torch_function_mode_stack
    for variable in effects.id_to_variable.values():
        mutation = variable.mutation_type
        if mutation is None or isinstance(mutation, (AttributeMutationNew, ValueMutationNew)):
            continue
        if isinstance(variable, TorchFunctionModeStackVariable) and len(variable.symbolic_stack) == len(modes):
            continue  # every mode that was entered was left
        if effects.is_modified(variable):
            yield variable, not _is_restored(variable, effects)


def written_attributes(output: Any, variable: Any) -> dict[str, Any]:
    """Return {attribute: Dynamo's variable} of the writes to one of these objects."""
    return dict(output.side_effects.store_attr_mutations.get(variable) or {})


def frames_of_writes(output: Any, variable: Any) -> list[tuple[str, int, str]]:
    """Return (file, line, function) of the writes to one of these objects (from torch 2.12 on)."""
    stacks = getattr(output.side_effects, "mutation_user_stacks", {}).get(variable, ())
    return [(frame.filename, frame.lineno or 0, frame.name) for stack in stacks for frame in stack]


def written_keys(variable: Any) -> dict[str, Any]:
    """Return {key: Dynamo's variable} of the items that the call put into a dict; empty for other objects."""
    before = getattr(variable, "original_items", None)
    if before is None:
        return {}
    # keys are wrapped in `items` only, and a value that was only read is realized in place
    items = [(getattr(key, "vt", key), value) for key, value in variable.items.items()]
    written = [(key, value) for key, value in items if variable.is_new_item(before.get(key), value)]
    return {key.as_python_constant(): value for key, value in written if key.is_python_constant()}


def is_as_before(variable: Any, before: Any) -> bool:
    """Return whether one of these objects is a dict or set that ends up with the same content as `before`."""
    items = getattr(variable, "original_items", {})
    if type(before) is dict:
        kept = [key is getattr(other, "vt", other) for key, other in zip(items, variable.items, strict=False)]
        return len(items) == len(variable.items) and all(kept) and not written_keys(variable)
    try:
        return type(before) is set and {key.vt.as_python_constant() for key in variable.items} == before
    except (NotImplementedError, AttributeError):
        return False


def is_tensor(variable: Any, fake: Any) -> bool:
    """Return whether a variable of Dynamo's is the tensor of this fake tensor, or a view of all of it."""
    node = getattr(getattr(variable, "proxy", None), "node", None)
    value = None if node is None else node.meta.get("example_value")
    if not isinstance(value, torch.Tensor) or not isinstance(fake, torch.Tensor):
        return False
    # compared as text: comparing symbols as numbers would add a guard that they are equal
    layouts = [
        (t.dtype, f"{t.shape} {t.stride()} {t.storage_offset()}", t.is_conj(), t.is_neg()) for t in (value, fake)
    ]
    return layouts[0] == layouts[1] and share_storage(value, fake)


def _is_restored(variable: Any, effects: Any) -> bool:
    """Return whether every attribute that the call wrote ends up with its previous value."""
    writes = effects.store_attr_mutations.get(variable)
    if not writes:
        return False
    value = getattr(variable, "value", None)
    if value is None or getattr(variable, "is_base_vt_modified", lambda _: False)(effects):
        return False
    for name, written in writes.items():
        try:
            now = written.as_python_constant()
        except NotImplementedError:
            return False
        before = getattr(value, "__dict__", {}).get(name, _ABSENT)
        if type(before) is not type(now) or before != now:
            return False
    return True


def translated_lines(error: BaseException) -> Iterator[tuple[str, int, str]]:
    """Yield (file, line, function) of the code that Dynamo was translating when it failed, the outermost first."""
    for translator in _translators(error):
        if translator.lineno > 0:
            yield translator.f_code.co_filename, translator.lineno, translator.f_code.co_name


def value_of_local(error: BaseException, function: str, name: str) -> Any:
    """Return the live object of a function's local, if Dynamo failed inside that function; else None."""
    failed = next((t for t in _translators(error) if t.f_code.co_name == function), None)
    return None if failed is None else getattr(failed.symbolic_locals[name].realize(), "value", None)


def _translators(error: BaseException) -> Iterator[Any]:
    """Yield Dynamo's instruction translators that were active when it failed, the outermost first."""
    objects = (frame.f_locals.get("self") for frame, _ in traceback.walk_tb(error.__traceback__))
    return (translator for translator in objects if isinstance(translator, InstructionTranslatorBase))


def has_dtensor(value: Any) -> bool:
    """Return whether a value is a DTensor or contains one."""
    module: Any = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(leaf, module.DTensor) for leaf in tree_leaves(value))


def real_object(value: Any) -> Any:
    """Return the object behind one of Dynamo's fake objects, such as a device mesh; any other value as it is."""
    return value.real_obj if isinstance(value, FakeScriptObject) else value


def is_size(value: Any) -> bool:
    """Return whether a value is a symbolic number."""
    return isinstance(value, proxy_tensor.py_sym_types)


class RecordedCalls:
    """A graph that records the ATen ops called on fake tensors whose nodes it knows.

    Args:
        root: The module that holds the graph's constants.
        values: Values of one of Dynamo's graphs, at least one of them a DTensor.
    """

    def __init__(self, root: torch.fx.GraphModule, values: Iterable[Any]) -> None:
        self._tracer = proxy_tensor.PythonKeyTracer()
        self._tracer.root = root
        self._tracer.tensor_attrs = {}
        self._tracer.graph = self.graph = torch.fx.Graph(tracer_cls=proxy_tensor.PythonKeyTracer)
        # not the backend's mode: Dynamo's fake tensors belong to the mode that it used while tracing
        self._mode = next(leaf.fake_mode for leaf in tree_leaves(list(values)) if isinstance(leaf, FakeTensor))

    def know(self, node: torch.fx.Node) -> None:
        """Associate the value of a node with that node."""
        value = node.meta.get("example_value")
        if isinstance(value, torch.Tensor) or is_size(value):
            proxy = torch.fx.Proxy(node, self._tracer)
            proxy_tensor.track_tensor_tree(value, proxy, constant=None, tracer=self._tracer)

    def node_of(self, value: Any) -> Any:
        """Return the node that produces a tensor or a size; any other value as it is."""
        proxy = self._tracer.unwrap_proxy(value)
        return proxy.node if isinstance(proxy, torch.fx.Proxy) else value

    def run(self, function: Callable[..., Any], args: Any, kwargs: Any, stack_trace: str | None) -> Any:
        """Call a function and record the ops that it calls, with the user's line."""
        before = len(self.graph.nodes)
        with tracing(TracingContext(self._mode)), self._mode, proxy_tensor.ProxyTorchDispatchMode(self._tracer, "real"):
            value = function(*args, **kwargs)
        for node in list(self.graph.nodes)[before:]:
            node.meta["example_value"] = node.meta.pop("val", None)
            node.meta["stack_trace"] = stack_trace
        return value


def fix_strides(fakes: Iterable[torch.Tensor]) -> None:
    """Specialize symbolic strides that do not follow from any size: gaps in memory."""
    tensors = list(fakes)
    size_symbols = {symbol for t in tensors for size in t.shape for symbol in _symbols(size)}
    all_strides: list[Any] = [stride for t in tensors for stride in t.stride()]
    strides = [stride for stride in all_strides if isinstance(stride, torch.SymInt)]
    for stride in sorted(strides, key=lambda stride: not stride.node.expr.is_Symbol):
        if not _symbols(stride) <= size_symbols:
            int(stride)  # adds a guard that it equals its hint, and replaces it by that


def hint_of(size: Any) -> int:
    """Return the value of a symbolic size in the example, without a guard; 0 if it depends on data."""
    return int(size.node.hint or 0) if isinstance(size, torch.SymInt) else int(size)


def make_equal(sizes: Sequence[Any]) -> None:
    """Unify the symbols of sizes that share a name, whether or not the model compares them."""
    for size in sizes[1:]:
        bool(size == sizes[0])  # adds a guard that they are equal, and replaces one by the other


def _symbols(size: Any) -> set[Any]:
    return set(size.node.expr.free_symbols) if isinstance(size, torch.SymInt) else set()


def made_by_custom_op(name: str) -> bool:
    """Return whether `ns::op` was made with `torch.library.custom_op`."""
    return name in OPDEFS


@contextlib.contextmanager
def marked_dynamic(dims: Iterable[tuple[torch.Tensor, int]]) -> Iterator[None]:
    """Mark these dimensions as dynamic for Dynamo, and unmark them afterwards: the tensors may be traced again."""
    tensors = []
    for tensor, dim in dims:
        tensors.append(tensor)
        dynamo.mark_dynamic(tensor, dim)
    try:
        yield
    finally:
        for tensor in tensors:
            for name in _MARKS:
                vars(tensor).pop(name, None)


def _logging_functions() -> set[Any]:
    """Return the logging functions, and those that libraries add to `logging.Logger` (transformers: `warning_once`)."""
    names = {*_LEVELS, *(name for name in vars(logging.Logger) if name.endswith("_once"))}
    return {getattr(owner, name) for owner in (logging, logging.Logger) for name in names if hasattr(owner, name)}


@contextlib.contextmanager
def _numbers_from_data() -> Iterator[None]:
    """Treat numbers read from tensors as unknown: otherwise torch takes an input's current value for a size."""
    original = FakeTensorMode.__init__

    @functools.wraps(original)
    def init(self: Any, **settings: Any) -> None:
        original(self, **{**settings, "export": True})

    with mock.patch.object(FakeTensorMode, "__init__", init):
        yield


_own_get = functools.cached_property.__get__


def _cached_property(self: Any, instance: Any, owner: Any = None) -> Any:
    """Replace `functools.cached_property.__get__`; while traced, take no lock and do not cache plain values."""
    if instance is None or not torch.compiler.is_dynamo_compiling():
        return _own_get(self, instance, owner)
    if self.attrname in instance.__dict__:
        return instance.__dict__[self.attrname]
    value = self.func(instance)
    if not isinstance(value, (type(None), bool, int, float, str, torch.dtype, torch.device)):
        setattr(instance, self.attrname, value)  # a cached tensor stays, even if the tensors behind it change
    return value


@contextlib.contextmanager
def quiet_tracing() -> Iterator[None]:
    """Isolate a trace: only marked sizes are dynamic, equal sizes are not unified, earlier traces have no effect."""
    with (
        warnings.catch_warnings(),
        dynamo.config.patch(
            automatic_dynamic_shapes=False,
            assume_static_by_default=True,
            force_nn_module_property_static_shapes=False,  # tensors that calls store there can have marked dimensions
            force_parameter_static_shapes=False,  # and so can buffers
            allow_ignore_mark_dynamic=False,
            suppress_errors=False,
            capture_scalar_outputs=True,
            capture_dynamic_output_shape_ops=True,
            verbose=True,  # keeps the traceback of Dynamo's errors, see `value_of_local`
            allow_rnn=True,  # in inference, RNN, LSTM and GRU are ordinary ops
        ),
        dynamo.config.patch({_IGNORED: _logging_functions()}),
        _numbers_from_data(),
        mock.patch.object(dynamo.utils, "to_numpy_helper", NumpyArray),
        mock.patch.object(functools.cached_property, "__get__", _cached_property),
        mock.patch.object(symbolic_shapes, "uninteresting_files", _OwnFiles),
        # Dynamo would flush the CPU's caches to log how long its guards take, which are not used again here.
        mock.patch.object(dynamo.guards, "profile_guard_manager", create=True, return_value=0.0),
        shape_config.patch(use_duck_shape=False),  # type: ignore[attr-defined]  # installed at run time
        # torch 2.11 logs that it cannot sort a setting that contains functions when it logs its settings.
        silenced("torch._guards", "torch._subclasses.fake_tensor", "torch._dynamo.metrics_context"),
    ):
        # Dynamo traces through `functools.lru_cache`, and its reads there are guarded like all others.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cache`")
        yield


def trace_frame(
    function: Callable[..., Any], backend: Callable[..., Any], filter_guards: Callable[..., Any]
) -> Callable[..., Any]:
    """Return `function` compiled by `backend` as one full graph; `filter_guards` receives every guard."""
    compiled: Callable[..., Any] = torch.compile(
        _fresh(function), fullgraph=True, backend=backend, dynamic=None, options={"guard_filter_fn": filter_guards}
    )
    return compiled


def _fresh(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return `function` with a fresh code object: Dynamo caches its results on the code object."""
    plain = getattr(function, "__func__", function)
    if not isinstance(plain, types.FunctionType):
        return function
    code = plain.__code__
    if code.co_filename.startswith(_TORCH):
        # A decorator of torch (`@torch.no_grad()`): Dynamo would wrap code in torch's files in a frame.
        code = code.replace(co_filename=__file__)
    copy = types.FunctionType(code.replace(), plain.__globals__, plain.__name__, plain.__defaults__, plain.__closure__)
    copy.__kwdefaults__ = plain.__kwdefaults__
    copy.__qualname__ = plain.__qualname__
    copy.__module__ = plain.__module__
    return types.MethodType(copy, function.__self__) if plain is not function else copy  # type: ignore[attr-defined]  # a bound method

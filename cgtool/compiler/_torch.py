"""The private torch names that `cgtool.compiler` uses. Verified with torch 2.13.0, written for 2.11 and newer.

Inductor and Dynamo are imported inside functions: they take seconds, and the `eager` adaptor needs neither. Only the
functions for worker processes patch torch. Names that only adaptors use are in `adaptors/_torch.py`.
"""

from __future__ import annotations

import contextlib
import math
import sys
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import torch.compiler.config
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._guards import detect_fake_mode
from torch._library.custom_ops import OPDEFS
from torch._ops import HigherOrderOperator
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, free_unbacked_symbols
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from cgtool.plan.grammar import digest_of
from cgtool.store.lock import file_lock

__all__ = ["FakeTensorMode"]

#: Loads the library of a probe with torch's own libraries alone, or with all of torch if these do not load alone.
_LOAD = """
from ctypes import CDLL
try:
    CDLL(r"__torch__")
    CDLL(r"__lib_path__")
except OSError:
    import torch
    CDLL(r"__lib_path__")
"""


def new_fake_mode(*, from_two: bool) -> FakeTensorMode:
    """Return a fake mode with a fresh ShapeEnv; with `from_two`, torch may assume that no size is 0 or 1."""
    shape_env = ShapeEnv(specialize_zero_one=from_two, duck_shape=False)
    return FakeTensorMode(shape_env=shape_env, allow_non_fake_inputs=True)


def fake_mode_of(value: Any) -> FakeTensorMode:
    """Return the fake mode of the tensors in `value`, or a new one."""
    return detect_fake_mode(tree_leaves(value)) or FakeTensorMode(allow_non_fake_inputs=True)


def _shape_env(mode: FakeTensorMode) -> Any:
    return mode.shape_env


def new_symbol(mode: FakeTensorMode, name: str, *, hint: int, low: int, high: int | None) -> Any:
    """Return a backed symbol of `mode`'s ShapeEnv; torch's name for it depends on `name` alone."""
    from torch._dynamo.source import ConstantSource
    from torch.utils._sympy.numbers import int_oo

    shape_env = _shape_env(mode)
    source = ConstantSource(name)
    symbol = shape_env.create_symbol(hint, source=source, dynamic_dim=DimDynamic.DYNAMIC)
    shape_env.constrain_symbol_range(symbol, compiler_min=low, compiler_max=int_oo if high is None else high)
    return shape_env.create_symintnode(symbol, hint=hint, source=source)


def symbol_of(size: torch.SymInt) -> Any:
    """Return the sympy symbol behind `size`."""
    return size.node.expr


def hint_of(size: int | torch.SymInt) -> int:
    """Return the example value of a size, without adding a guard."""
    return int(size.node.hint) if isinstance(size, torch.SymInt) else int(size)


def is_backed(size: int | torch.SymInt) -> bool:
    """Return whether a size has an example value; a size that comes from a tensor's data has none."""
    return not isinstance(size, torch.SymInt) or size.node.hint is not None


def storage_id(tensor: torch.Tensor) -> int:
    """Return the identity of a tensor's storage; works for fake tensors too, which have no address."""
    return int(tensor.untyped_storage()._cdata)


def guard_exprs(mode: FakeTensorMode) -> list[Any]:
    """Return the ShapeEnv's guards on sizes so far, as sympy expressions, in order."""
    shape_env = _shape_env(mode)
    asserts = [assertion for group in shape_env.deferred_runtime_asserts.values() for assertion in group]
    found = (guard.expr for guard in (*shape_env.guards, *asserts))
    return [expr for expr in found if not free_unbacked_symbols(expr)]  # unbacked ones are checked at run time


def python_dispatcher() -> contextlib.AbstractContextManager[Any]:
    """Return a context that decomposes composite ops in Python, which accepts symbolic sizes."""
    return enable_python_dispatcher()


def is_known(mode: FakeTensorMode, expr: Any) -> bool:
    """Return whether the ShapeEnv's ranges, equalities and divisibilities alone make `expr` true."""
    import sympy

    shape_env = _shape_env(mode)
    if shape_env._maybe_evaluate_static(expr) == sympy.true:
        return True
    # s % 4 == 0 means s == 4 * t; after this substitution, plain arithmetic proves most consequences
    multiples = {}
    for symbol in expr.free_symbols:
        factor = math.lcm(*_divisors(shape_env, symbol))
        if factor > 1:
            multiples[symbol] = factor * sympy.Symbol(f"{symbol.name}_part", integer=True, positive=True)
    return bool(multiples) and sympy.simplify(expr.xreplace(multiples)) == sympy.true


def fixed_sizes(mode: FakeTensorMode) -> dict[str, int]:
    """Return the symbols that the ShapeEnv has specialized to one size, by torch's names."""
    shape_env = _shape_env(mode)
    found = {}
    for symbol, bounds in shape_env.var_to_range.items():
        value = shape_env.replacements.get(symbol, bounds.lower if bounds.lower == bounds.upper else symbol)
        if value.is_number:
            found[str(symbol)] = int(value)
    return found


def _divisors(shape_env: Any, symbol: Any) -> list[int]:
    """Return the numbers that divide `symbol` according to the ShapeEnv's guards."""
    import sympy
    from torch.utils._sympy.functions import Mod

    found = []
    for guard in shape_env.guards:
        if isinstance(guard.expr, sympy.Eq) and guard.expr.args[1] == 0 and isinstance(guard.expr.args[0], Mod):
            dividend, divisor = guard.expr.args[0].args
            if dividend == symbol and isinstance(divisor, sympy.Integer):
                found.append(int(divisor))
    return found


#: Ops whose windows Inductor computes from the height and width as constants.
_FIXES_SIZES = (torch.ops.aten._adaptive_avg_pool2d, torch.ops.aten.adaptive_max_pool2d)


class CalledOps(TorchDispatchMode, contextlib.ContextDecorator):  # type: ignore[no-untyped-call]  # 2.11 to 2.15
    """Records the ops that are called while it is active, after composite ops are decomposed.

    Attributes:
        at: The index of the graph's call that is running, set by the caller.
        found: Call of the graph → the ops that it was decomposed into.
        drawing: Calls of the graph that draw random numbers.
        fixing: Calls with a dynamic size for which Inductor generates code for one size only.
        written: The storages that were written to.
    """

    supports_higher_order_operators = True

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # as above
        self.at = 0
        self.found: dict[int, set[Any]] = {}
        self.drawing: set[int] = set()
        self.fixing: set[int] = set()
        self.written: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Record `func`, and call it."""
        del types
        kwargs = kwargs or {}
        if isinstance(func, HigherOrderOperator):  # torch leaves this mode around it
            return func(*tree_map_only(fx.GraphModule, self, args), **kwargs)
        self.found.setdefault(self.at, set()).add(func)
        if torch.Tag.nondeterministic_seeded in func.tags and _drops_out(func, args, kwargs) is not False:
            self.drawing.add(self.at)
        if func.overloadpacket in _FIXES_SIZES and any(isinstance(size, torch.SymInt) for size in args[0].shape[-2:]):
            self.fixing.add(self.at)
        positions = [n for n, argument in enumerate(func._schema.arguments) if argument.is_write]
        names = [func._schema.arguments[n].name for n in positions]
        written = [*(args[n] for n in positions if n < len(args)), *(kwargs.get(name) for name in names)]
        self.written.update(storage_id(leaf) for leaf in tree_leaves(written) if isinstance(leaf, torch.Tensor))
        return func(*args, **kwargs)


def _drops_out(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool | None:
    """Return whether `dropout_p` is nonzero in this call; None if the op has no such argument."""
    for index, argument in enumerate(func._schema.arguments):
        if argument.name == "dropout_p":
            return bool(args[index] if index < len(args) else kwargs.get("dropout_p", argument.default_value))
    return None


@contextlib.contextmanager
def record_autotuning() -> Iterator[list[dict[str, Any]]]:
    """Yield a list that collects what autotuning tries in the block: an op's name, and each candidate's seconds."""
    from torch._inductor import select_algorithm

    tried: list[dict[str, Any]] = []

    def save(timings: Mapping[Any, float], name: str, *_: Any) -> None:  # further arguments depend on torch's version
        candidates = sorted((milliseconds / 1e3, choice.name) for choice, milliseconds in timings.items())
        tried.append({"op": name, "candidates": [{"name": name, "secs": secs} for secs, name in candidates]})

    select_algorithm.add_feedback_saver(save)
    try:
        yield tried
    finally:
        select_algorithm.clear_feedback_savers()  # type: ignore[no-untyped-call]  # torch leaves it untyped


def inductor_options() -> dict[str, Any]:
    """Return every option of Inductor by its dotted name, with its current value."""
    import torch._inductor.config as inductor_config

    return inductor_config.get_config_copy()


def portable_options(patches: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of Inductor that may change code, with `patches` applied."""
    import torch._inductor.config as inductor_config

    with inductor_config.patch(dict(patches)):
        return inductor_config.save_config_portable()


def cpu_isa() -> str:
    """Return the vector instruction set that Inductor generates C++ for, or "none"."""
    from torch._inductor.cpu_vec_isa import pick_vec_isa

    return str(pick_vec_isa())


# for worker processes: these change torch's settings until the process ends


def set_inductor_options(values: Mapping[str, Any]) -> None:
    """Set options of Inductor for the rest of this process."""
    import torch._inductor.config as inductor_config

    inductor_config.load_config(dict(values))


def import_inductor(threads: int) -> None:
    """Import what every compile needs; Inductor may use `threads` processes for a compile, 1 for none."""
    import torch._inductor.compile_fx

    torch._inductor.config.compile_threads = threads


def share_probes(folder: Path) -> None:
    """Probe which instruction sets the compiler and the CPU support once for all workers that share `folder`.

    torch compiles and loads a small library for each of about ten instruction sets in every process, one after the
    other, and before 2.13 each load imports torch again: 20 s in total on an H200 machine. Here the answers are kept as
    empty files, and a library is loaded with torch's own libraries alone.
    """
    from torch._inductor import cpu_vec_isa

    isa: Any = cpu_vec_isa.VecISA
    check_build = isa.check_build

    def shared(self: Any, code: str) -> bool:
        name = digest_of([str(self), self.build_arch_flags(), self._arch_flags, code])
        with file_lock(folder / f"isa-{name}.lock"):
            for answer in (True, False):
                if (folder / f"isa-{name}.{answer}").exists():
                    return answer
            is_supported = bool(check_build(self, code))
            (folder / f"isa-{name}.{is_supported}").touch()
        return is_supported

    isa.check_build = shared
    isa._avx_py_load = _LOAD.replace("__torch__", str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def probe() -> None:
    """Probe the instruction sets that torch can generate C++ for, in parallel."""
    from torch._inductor import cpu_vec_isa

    sets: Any = cpu_vec_isa.supported_vec_isa_list
    named: Any = cpu_vec_isa.x86_isa_checker()
    # the sets that torch's own selection will probe
    wanted = [isa for isa in sets if all(flag in named for flag in str(isa).split())]
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as threads:
        list(threads.map(bool, wanted))
    cpu_vec_isa.pick_vec_isa()


def places_of(op: str) -> Iterator[str]:
    """Yield "file:line" of each place where `ns::op.overload` or one of its kernels was registered."""
    for line in torch._C._dispatch_dump(op.removesuffix(".default")).splitlines():
        _, found, rest = line.partition("registered at ")
        if found:
            yield rest.split(" ")[0]


def author_of(op: str) -> Any:
    """Return the function decorated with `@torch.library.custom_op`, or None if the op was registered otherwise."""
    definition = OPDEFS.get(op.partition(".")[0])
    return None if definition is None else definition._init_fn


def op_name(op: Any) -> str:
    """Return `ns::op.overload` of an overload."""
    return str(op.name()) if "." in op.name() else f"{op.name()}.{op._overloadname}"


def shims_of_templates(op: Any) -> list[str]:
    """Return the C++ names of an op's extern kernels, if Inductor also has templates for the op."""
    import torch._inductor.lowering  # noqa: F401 - registers the kernels
    from torch._inductor.select_algorithm import ExternKernelChoice

    modules = [module for name, module in list(sys.modules.items()) if name.startswith("torch._inductor.kernel")]
    choices = [value for module in modules for value in vars(module).values() if isinstance(value, ExternKernelChoice)]
    return [choice.cpp_kernel_name for choice in choices if choice.op_overload is op and choice.cpp_kernel_name]

"""The private torch names that a compile worker needs. Read in torch 2.13.0, written for 2.11 and newer.

Inductor is imported inside functions. `set_inductor_options` and `use_threads` change torch's settings for good: they
are for a worker process, which ends with its work.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch._library.custom_ops import OPDEFS

from cgtool.plan.grammar import digest_of
from cgtool.store.lock import FileLock

#: Loads the library of a probe: with torch's own libraries, or where they do not load by themselves, with all of torch.
_LOAD = """
from ctypes import CDLL
try:
    CDLL(r"__torch__")
    CDLL(r"__lib_path__")
except OSError:
    import torch
    CDLL(r"__lib_path__")
"""


def set_inductor_options(values: Mapping[str, Any]) -> None:
    """Set options of Inductor for the rest of this process."""
    import torch._inductor.config as inductor_config

    inductor_config.load_config(dict(values))


def use_threads(count: int) -> None:
    """Let Inductor compile with `count` processes of its own in this process; 1 starts none."""
    import torch._inductor.config as inductor_config

    inductor_config.compile_threads = count


def import_inductor() -> None:
    """Import what every compile needs, before there is one."""
    import torch._inductor.compile_fx  # noqa: F401 - for what it loads


def share_probes(folder: Path) -> None:
    """Ask what instruction sets the compiler and the CPU take once for all workers that share `folder`.

    torch compiles and loads a small library for each of about ten sets in every process, one after the other, and
    before 2.13 each load imports torch again: 20 s in all beside an H200. Here the answers are kept as empty files, and
    a library is loaded with torch's own libraries alone.
    """
    from torch._inductor import cpu_vec_isa

    isa: Any = cpu_vec_isa.VecISA
    ask = isa.check_build

    def shared(self: Any, code: str) -> bool:
        name = digest_of([str(self), self.build_arch_flags(), self._arch_flags, code])
        with FileLock(folder / f"isa-{name}.lock"):
            for answer in (True, False):
                if (folder / f"isa-{name}.{answer}").exists():
                    return answer
            found = bool(ask(self, code))
            (folder / f"isa-{name}.{found}").touch()
        return found

    isa.check_build = shared
    isa._avx_py_load = _LOAD.replace("__torch__", str(Path(torch.__file__).parent / "lib" / "libtorch_cpu.so"))


def probe() -> None:
    """Find the instruction sets that torch writes C++ for, several at a time."""
    from torch._inductor import cpu_vec_isa

    sets: Any = cpu_vec_isa.supported_vec_isa_list
    named: Any = cpu_vec_isa.x86_isa_checker()
    # those whose answers torch will want, as it picks them
    wanted = [isa for isa in sets if all(flag in named for flag in str(isa).split())]
    with ThreadPoolExecutor(max_workers=max(1, len(wanted))) as threads:
        list(threads.map(bool, wanted))
    cpu_vec_isa.pick_vec_isa()


def places_of(op: str) -> Iterator[str]:
    """Yield "file:line" of each place where `ns::op.overload` was defined or got a kernel."""
    for line in torch._C._dispatch_dump(op.removesuffix(".default")).splitlines():
        _, found, rest = line.partition("registered at ")
        if found:
            yield rest.split(" ")[0]


def author_of(op: str) -> Any:
    """Return the function under `@torch.library.custom_op`, or None where the op was made in another way."""
    definition = OPDEFS.get(op.partition(".")[0])
    return None if definition is None else definition._init_fn

"""Features of the process, the machine and the installation, which Dynamo folds, mostly without guards."""

from __future__ import annotations

import sys

from soundness_code import reads
from soundness_projects import Feature

#: Where Python warns of a function, or computes in C, Dynamo cannot trace it.
_FROM_3_13 = sys.version_info >= (3, 13)
#: Puts a folder first where modules are looked for, before the model is built.
_FOLDER = """\
import importlib, pathlib, sys
folder = pathlib.Path(os.getcwd()).parent / 'installed'
folder.mkdir(exist_ok=True)
sys.path.insert(0, str(folder))
importlib.invalidate_caches()
"""
#: Puts a module there.
INSTALLED = f"{_FOLDER}(folder / 'sound_kernels.py').write_text('')"
#: Puts another version of a distribution there.
UPGRADED = f"""{_FOLDER}
new = folder / 'sound_kernels-2.dist-info'
new.mkdir(exist_ok=True)
(new / 'METADATA').write_text('Name: sound-kernels\\nVersion: 2\\n')
"""
#: Makes the process one of a group.
GROUPED = "import torch.distributed as d; d.init_process_group('gloo', store=d.HashStore(), rank=0, world_size=1)"
PLACES = ("model", "submodule", "helper")


def asks(condition: str, live: str = "", names: str = "", head: str = "", **fields) -> Feature:
    """Return a feature whose method `factor` returns 3.0 where a condition of the process holds."""
    return reads(
        f"3.0 if {condition} else 2.0", **{"head": head, "live": live, "names": names, "places": PLACES} | fields
    )


def refused(condition: str, head: str, names: str) -> Feature:
    """Return a feature that `warm` refuses, because the answer differs in each process."""
    return asks(condition, head=head, names=names, refused=True)


PROCESS = {
    "process_group": asks("torch.distributed.is_initialized()", GROUPED, "distributed"),
    "rank_of_the_process": Feature(
        head="import torch.distributed as dist",
        body=(
            "def factor(self):\n    try:\n        return 3.0 + dist.get_rank()\n"
            "    except ValueError:\n        return 2.0"
        ),
        live=GROUPED,
        names="distributed",
        places=PLACES,
    ),
    "launched_by_torchelastic": asks(
        "torch.distributed.is_torchelastic_launched()",
        environment={"TORCHELASTIC_RUN_ID": "1"},
        names="TORCHELASTIC_RUN_ID",
    ),
    "module_is_there": asks(
        "importlib.util.find_spec('sound_kernels') is not None",
        early=INSTALLED,
        names="sound_kernels",
        head="import importlib.util",
        places=("model",),
    ),
    "module_of_a_computed_name_is_there": Feature(
        head="from importlib.util import find_spec\n\ndef has(name):\n    return find_spec(name) is not None",
        body="def factor(self):\n    return 3.0 if has('sound_kern' + 'els') else 2.0",
        early=INSTALLED,
        names="sound_kernels",
        places=("model",),
    ),
    "loader_is_there": asks(
        "pkgutil.find_loader('sound_kernels') is not None",
        early=INSTALLED,
        names="sound_kernels|find_loader",
        head="import pkgutil",
        places=("model",),
        refused=_FROM_3_13,
    ),
    "version_of_a_distribution": asks(
        "importlib.metadata.version('sound-kernels') == '2'",
        early=UPGRADED,
        names="sound-kernels",
        head="import importlib.metadata",
        files={"../sound_kernels-1.dist-info/METADATA": "Name: sound-kernels\nVersion: 1\n"},
        places=("model",),
    ),
    "module_is_imported": asks(
        "sys.modules.get('sound_kernels') is not None",
        "sys.modules['sound_kernels'] = sys",
        "sound_kernels|modules",
        "import sys",
    ),
    "name_of_the_machine": asks(
        "platform.node() == 'elsewhere'",
        "import platform; platform._uname_cache = platform.uname_result('Linux', 'elsewhere', '1', '1', 'x86_64')",
        "uname",
        "import platform",
    ),
    "version_of_python": asks(
        "platform.python_version() == '3.99.1'",
        "import platform, sys; sys.version = '3.99.1' + sys.version[6:]; platform._sys_version_cache.clear()",
        "version",
        "import platform",
    ),
    "flags_of_python": asks(
        "sys.flags.optimize == 5",
        # with all the others: what imports a module asks for some
        "import types; flags = {n: getattr(sys.flags, n) for n in dir(sys.flags) if n[0] != '_'}; "
        "sys.flags = types.SimpleNamespace(**flags | {'optimize': 5})",
        "flags",
        "import sys",
    ),
    "path_of_python": asks("'/elsewhere' in sys.path", "sys.path.append('/elsewhere')", "path", "import sys"),
    "python_itself": asks(
        "sys.executable == '/elsewhere'", "sys.executable = '/elsewhere'", "executable", "import sys"
    ),
    "output_of_the_process": asks("sys.stdout is None", "sys.stdout = None", "stdout", "import sys"),
    "number_of_arguments": asks("len(sys.argv) > 20", "sys.argv.extend('x' * 30)", "argv", "import sys"),
    "name_of_the_thread": asks(
        "threading.main_thread().name == 'x'",
        "import threading; threading.main_thread().name = 'x'",
        "thread",
        "import threading",
    ),
    "name_of_the_process": asks(
        "multiprocessing.current_process().name == 'x'",
        "import multiprocessing; multiprocessing.current_process().name = 'x'",
        "process",
        "import multiprocessing",
    ),
    "folder_of_temporary_files": asks(
        "tempfile.gettempdir() == '/x'",
        "import tempfile; tempfile.tempdir = '/x'",
        "tempdir",
        "import tempfile\n\ntempfile.gettempdir()",
    ),
    "home_by_a_path": asks(
        "str(pathlib.Path.home()) == '/elsewhere'",
        environment={"HOME": "/elsewhere"},
        names="HOME|home",
        head="import pathlib",
        refused=_FROM_3_13,
    ),
    "type_checking": asks(
        "typing.TYPE_CHECKING", "import typing; typing.TYPE_CHECKING = True", "TYPE_CHECKING", "import typing"
    ),
    "cuda_is_there": asks("torch.cuda.is_available()", "torch.cuda.is_available = lambda: True", "is_available"),
    "cuda_is_initialized": refused("torch.cuda.is_initialized()", "import torch", "is_initialized"),
    "version_of_cudnn": refused("torch.backends.cudnn.version() == 3", "import torch", "version"),
    "setting_of_dynamo": asks(
        "torch._dynamo.config.recompile_limit == 77",
        "import torch._dynamo; torch._dynamo.config.recompile_limit = 77",
        "recompile_limit",
        "import torch._dynamo",
    ),
    "setting_of_inductor": asks(
        "torch._inductor.config.debug",
        "import torch._inductor.config; torch._inductor.config.debug = True",
        "debug",
        "import torch._inductor.config",
    ),
    "setting_of_functorch": asks(
        "torch._functorch.config.functionalize_rng_ops",
        "import torch._functorch.config; torch._functorch.config.functionalize_rng_ops = True",
        "functionalize_rng_ops",
        "import torch._functorch.config",
    ),
    "strategy_of_einsum": asks(
        "torch.backends.opt_einsum.strategy == 'greedy'",
        "torch.backends.opt_einsum.enabled = True; torch.backends.opt_einsum.strategy = 'greedy'",
        "einsum",
    ),
    "engine_of_quantized_ops": asks(
        "torch.backends.quantized.engine == 'onednn'",
        "torch.backends.quantized.engine = 'onednn'",
        "engine",
    ),
    "name_in_builtins": asks(
        "hasattr(builtins, 'sound')", "import builtins; builtins.sound = 1", "sound|builtins", "import builtins"
    ),
    **{
        name: refused(condition, head, names)
        for name, condition, head, names in (
            ("file_is_there", "os.path.exists('/x')", "import os", "exists"),
            ("text_of_a_file", "open('/etc/hostname').read() == 'x'", "import os", "open"),
            ("folder_is_listed", "os.listdir('/tmp') == []", "import os", "listdir"),
            ("number_of_cores", "os.cpu_count() == 77", "import os", "cpu_count"),
            ("number_of_the_process", "os.getpid() == 1", "import os", "getpid"),
            ("name_by_socket", "socket.gethostname() == 'x'", "import socket", "gethostname"),
            ("time_of_day", "time.time() > 0", "import time", "time"),
            ("date", "datetime.datetime.now().year == 1", "import datetime", "now"),
            ("locale", "locale.getlocale() == 'x'", "import locale", "getlocale"),
            ("garbage_collection", "gc.isenabled()", "import gc", "isenabled"),
            ("random_number", "random.random() > 2", "import random", "random"),
            ("random_number_of_a_range", "random.uniform(0, 1) > 2", "import random", "random"),
            ("random_number_of_numpy", "numpy.random.rand() > 2", "import numpy", "random|rand"),
            ("counter", "next(COUNTER) > 5", "import itertools\n\nCOUNTER = itertools.count()", "COUNTER"),
            ("subclasses", "len(Parent.__subclasses__()) > 5", "class Parent:\n    pass\n", "__subclasses__"),
        )
    },
}

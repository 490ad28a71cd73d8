"""Measures steps that are served from CUDA graphs, and starts that capture them; prints a table of medians.

    python tests/measure_serving.py tiny FOLDER      tiny_llama, width 2048, 32 layers, bfloat16, paged attention
    python tests/measure_serving.py llama FOLDER     transformers' Llama at 8B, bfloat16, no KV cache: steps
    python tests/measure_serving.py llama-starts FOLDER     its starts with 35 sizes, after `llama`

Needs a CUDA device. FOLDER keeps what was compiled, so that a second run measures alone. A step is timed in a loop of
steps that ends with the device's last kernel; ways take turns, and a ratio is that of their medians. The time to read
all weights once is the bytes of the weights that a step reads (the embedding's left out: a step looks up a few rows),
divided by the bandwidth of a copy on the device, measured in the same run. Starts are processes of their own.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO / "fixtures"))
sys.path.insert(0, str(REPO))

import torch  # noqa: E402
from measure_large import SIZES as LLAMA_SIZES  # noqa: E402

import cgtool  # noqa: E402
from cgtool.serving.attention import allocate_kv_caches  # noqa: E402
from cgtool.serving.forward_context import BatchDescriptor, ForwardContext, set_forward_context  # noqa: E402
from cgtool.serving.graphs import CudaGraphs  # noqa: E402
from cgtool.serving.sizes import vllm_capture_sizes  # noqa: E402

SIZES = [size for size in vllm_capture_sizes(256) if size <= 256]
BATCH, PREFILL, CONTEXT = 8, 1024, 64
ROUNDS, STEPS = 7, 40
TINY = {"num_layers": 32, "width": 2048, "num_heads": 16, "num_kv_heads": 8, "intermediate": 5632, "vocab": 32000}
LLAMA = {**LLAMA_SIZES, "use_cache": False}
DEVICE = torch.device("cuda")


def say(name: str, value: object) -> None:
    """Print a row of the table, and append it to FOLDER's `results.jsonl`."""
    sys.stdout.write(f"| {name} | {value} |\n")
    sys.stdout.flush()
    with (Path(sys.argv[2]) / "results.jsonl").open("a") as file:
        file.write(json.dumps([name, value]) + "\n")


def timed(ways: Mapping[str, Callable[[], Any]], *, steps: int = STEPS) -> dict[str, float]:
    """Return the median milliseconds of a step for each way, and print it with its extremes."""
    for step in ways.values():
        for _ in range(3):
            step()
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(ROUNDS):
        for name, step in ways.items():
            torch.cuda.synchronize()
            began = time.perf_counter()
            for _ in range(steps):
                step()
            torch.cuda.synchronize()
            taken[name].append((time.perf_counter() - began) / steps * 1e3)
    for name, values in taken.items():
        say(f"{name}, ms", f"{statistics.median(values):.3f} ({min(values):.3f} to {max(values):.3f})")
    return {name: statistics.median(values) for name, values in taken.items()}


def read_once_ms(module: torch.nn.Module) -> float:
    """Return the milliseconds that reading a step's weights takes at the bandwidth of a copy."""
    embedded = {id(part.weight) for part in module.modules() if isinstance(part, torch.nn.Embedding)}
    weights = {id(tensor): tensor for tensor in module.parameters() if id(tensor) not in embedded}
    num_bytes = sum(tensor.nbytes for tensor in weights.values())
    source = torch.empty(1 << 31, dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    copying = timed({"a copy of 2 GiB": lambda: target.copy_(source)}, steps=20)["a copy of 2 GiB"]
    bandwidth = 2 * source.nbytes / copying * 1e3
    say("weights that a step reads, GB", round(num_bytes / 1e9, 3))
    say("bandwidth of a copy, TB/s", round(bandwidth / 1e12, 3))
    return num_bytes / bandwidth * 1e3


def ratios(pairs: Mapping[str, tuple[float, float]]) -> None:
    for name, (value, other) in pairs.items():
        say(name, round(value / other, 3))


def tiny_module() -> torch.nn.Module:
    import paged_llama

    with torch.device(DEVICE):
        spec = paged_llama.build(**TINY, dtype="bfloat16", draw_on_device=True)
    module: torch.nn.Module = spec.module.requires_grad_(requires_grad=False)
    return module


def tiny_runner(module: torch.nn.Module, model: Any, mode: str, sizes: list[int], **options: Any) -> cgtool.ModelRunner:
    limits = cgtool.BatchLimits(max_num_seqs=256, max_num_tokens=PREFILL, max_seq_len=PREFILL)
    caches = allocate_kv_caches(
        [f"layers.{index}.self_attn" for index in range(TINY["num_layers"])],
        num_blocks=1024,
        block_size=limits.block_size,
        num_kv_heads=TINY["num_kv_heads"],
        head_dim=TINY["width"] // TINY["num_heads"],
        dtype=next(module.parameters()).dtype,
        device=DEVICE,
    )
    config = cgtool.CompilationConfig(cudagraph_mode=mode, cudagraph_capture_sizes=sizes)
    return cgtool.ModelRunner(model, limits=limits, config=config, kv_caches=caches, device=DEVICE, **options)


def decode_batch(size: int) -> list[cgtool.Request]:
    per = -(-CONTEXT // 16)
    return [
        cgtool.Request(token_ids=[7], num_computed=CONTEXT - 1, blocks=list(range(1 + row * per, 1 + (row + 1) * per)))
        for row in range(size)
    ]


def tiny(folder: Path) -> None:
    """Decode and prefill steps, capture and its memory, and starts."""
    module = tiny_module()
    ids = torch.arange(BATCH, device=DEVICE)
    dynamic = {"input_ids": {0: "num_tokens"}, "positions": {0: "num_tokens"}}
    cgtool.compile(module, example_args=(ids, ids.clone()), dynamic=dynamic, cache_dir=folder / "tiny")

    def loaded() -> Any:
        return cgtool.load(module, cache_dir=folder / "tiny")

    full, piecewise, none = cgtool.CUDAGraphMode.FULL, cgtool.CUDAGraphMode.PIECEWISE, cgtool.CUDAGraphMode.NONE
    decode = BatchDescriptor(BATCH, num_reqs=BATCH, uniform=True)
    runner = tiny_runner(module, loaded(), "FULL_AND_PIECEWISE", SIZES, context_sizes=[*SIZES, PREFILL])
    report = runner.capture()
    say(f"capture of {len(SIZES)} FULL and {len(SIZES) + 1} PIECEWISE sizes, s", round(report.secs, 2))
    compiled = torch.compile(module, mode="reduce-overhead")
    plain = tiny_runner(module, compiled, "NONE", SIZES)
    batch = decode_batch(BATCH)
    captured_keys = list(runner.dispatcher.keys())
    keys = dict(reversed([(mode, key) for mode, key in captured_keys if key.num_tokens == BATCH]))
    ways = {
        "decode of 8, FULL": lambda: runner.execute(batch, full, keys[full]),
        "decode of 8, PIECEWISE": lambda: runner.execute(batch, piecewise, keys[piecewise]),
        "decode of 8, pieces without graphs": lambda: runner.execute(batch, none, decode),
        "decode of 8, torch.compile reduce-overhead": lambda: plain.execute(batch, none, decode),
    }
    took = timed(ways)
    prompt = [cgtool.Request(token_ids=[7] * PREFILL, num_computed=0, blocks=list(range(1, 1 + PREFILL // 16)))]
    captured = next(k for mode, k in captured_keys if (mode, k.num_tokens) == (piecewise, PREFILL))
    prefill = timed(
        {
            "prefill of 1024, PIECEWISE": lambda: runner.execute(prompt, piecewise, captured),
            "prefill of 1024, pieces without graphs": lambda: runner.execute(prompt, none, BatchDescriptor(PREFILL)),
        },
        steps=10,
    )
    once = read_once_ms(module)
    names = iter([*took.values(), *prefill.values()])
    full_ms, piecewise_ms, _, reduced_ms, prefill_ms, plain_prefill_ms = names
    ratios(
        {
            "FULL over reduce-overhead": (full_ms, reduced_ms),
            "FULL over reading the weights once": (full_ms, once),
            "PIECEWISE over FULL": (piecewise_ms, full_ms),
            "prefill, PIECEWISE over pieces without graphs": (prefill_ms, plain_prefill_ms),
        }
    )
    say("launching a PIECEWISE step, µs a piece", round(host_us(ways["decode of 8, PIECEWISE"]) / 33, 1))
    import paged_kernels

    with mock.patch.object(paged_kernels, "paged_attention", launch_nothing):
        say("the same without attention's kernels", round(host_us(ways["decode of 8, PIECEWISE"]) / 33, 1))
    decisions = 100_000
    began = time.perf_counter()
    for _ in range(decisions):
        runner.dispatcher.dispatch(BATCH, uniform=True)
    say("dispatcher's decision, µs", round((time.perf_counter() - began) / decisions * 1e6, 2))
    runner.sleep()
    alone = tiny_runner(module, loaded(), "FULL_AND_PIECEWISE", SIZES[-1:]).capture()
    every = tiny_runner(module, loaded(), "FULL_AND_PIECEWISE", SIZES).capture()
    say(f"capture of {len(SIZES)} sizes, FULL_AND_PIECEWISE, s", round(every.secs, 2))
    say(f"memory of {len(SIZES)} sizes over the largest alone", round(every.pool_bytes / alone.pool_bytes, 3))
    starts = {way: started("tiny-start", folder, way) for way in ("eager", "cgtool")}
    ratios({"start with 35 FULL sizes over eager's ready": (starts["cgtool"], starts["eager"])})


def host_us(step: Callable[[], Any]) -> float:
    """Return the microseconds that the host takes for a step, with a device that is idle when it begins."""
    taken = []
    for _ in range(30):
        torch.cuda.synchronize()
        began = time.perf_counter()
        step()
        taken.append((time.perf_counter() - began) * 1e6)
    return statistics.median(taken)


def launch_nothing(*_args: object, **_named: object) -> None:
    """Stand in for attention, to see what the rest takes."""


def tiny_start(folder: Path, way: str) -> float:
    module = tiny_module()
    torch.cuda.synchronize()
    began = time.perf_counter()
    if way == "eager":
        runner = tiny_runner(module, module, "NONE", SIZES)
    else:
        runner = tiny_runner(module, cgtool.load(module, cache_dir=folder / "tiny"), "FULL_DECODE_ONLY", SIZES)
        runner.capture()
    runner.run(decode_batch(BATCH))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def llama_module() -> torch.nn.Module:
    from transformers import LlamaConfig, LlamaModel

    with torch.device(DEVICE):
        module = LlamaModel._from_config(LlamaConfig(**LLAMA), dtype=torch.bfloat16, attn_implementation="sdpa")
    ready: torch.nn.Module = module.eval().requires_grad_(requires_grad=False)
    return ready


def tokens(size: int) -> dict[str, torch.Tensor]:
    return {"input_ids": torch.arange(size, device=DEVICE)[None]}


def in_mode(model: Any, call: Mapping[str, Any], mode: cgtool.CUDAGraphMode, *, capturing: bool = False) -> Any:
    descriptor = BatchDescriptor(call["input_ids"].shape[1])
    context = ForwardContext(batch_descriptor=descriptor, cudagraph_runtime_mode=mode, capturing=capturing)
    with set_forward_context(context), torch.no_grad():
        return model(**call)


def llama(folder: Path) -> None:
    """One token, in every way."""
    module = llama_module()
    dynamic = {"input_ids": {1: "num_tokens"}}
    began = time.perf_counter()
    tuned = cgtool.CompilationConfig(compile_sizes=[1])
    cgtool.compile(module, example_kwargs=tokens(BATCH), dynamic=dynamic, config=tuned, cache_dir=folder / "llama")
    say("8B: warm, s", round(time.perf_counter() - began, 1))
    call, full, piecewise = tokens(1), cgtool.CUDAGraphMode.FULL, cgtool.CUDAGraphMode.PIECEWISE
    model = cgtool.load(module, cache_dir=folder / "llama")
    graphed = cgtool.GraphedModel(model, backend=CudaGraphs(DEVICE), copy_inputs=True)
    for mode in (full, piecewise):
        for capturing in (False, True):
            in_mode(graphed, call, mode if capturing else cgtool.CUDAGraphMode.NONE, capturing=capturing)
    compiled = torch.compile(module, mode="reduce-overhead", dynamic=False)
    took = timed(
        {
            "8B, one token, FULL": lambda: in_mode(graphed, call, full),
            "8B, one token, PIECEWISE": lambda: in_mode(graphed, call, piecewise),
            "8B, one token, pieces without graphs": lambda: in_mode(graphed, call, cgtool.CUDAGraphMode.NONE),
            "8B, one token, torch.compile reduce-overhead": lambda: in_mode(compiled, call, cgtool.CUDAGraphMode.NONE),
        }
    )
    once = read_once_ms(module)
    full_ms, piecewise_ms, _, reduced_ms = took.values()
    ratios(
        {
            "8B: FULL over reduce-overhead": (full_ms, reduced_ms),
            "8B: FULL over reading the weights once": (full_ms, once),
            "8B: PIECEWISE over FULL": (piecewise_ms, full_ms),
        }
    )


def llama_starts(folder: Path) -> None:
    """Starts with 35 sizes."""
    started("llama-start", folder, "torch.compile")  # fills its caches
    starts = {way: started("llama-start", folder, way) for way in ("torch.compile", "cgtool")}
    ratios({"8B: start with 35 sizes over torch.compile's": (starts["cgtool"], starts["torch.compile"])})


def llama_start(folder: Path, way: str) -> float:
    module = llama_module()
    torch.cuda.synchronize()
    began = time.perf_counter()
    if way == "cgtool":
        model = cgtool.load(module, cache_dir=folder / "llama")
        graphed = cgtool.GraphedModel(model, backend=CudaGraphs(DEVICE), piecewise=False)
        graphed.open_all()
        for size in reversed(SIZES):
            call = tokens(size)
            in_mode(graphed, call, cgtool.CUDAGraphMode.NONE)
            in_mode(graphed, call, cgtool.CUDAGraphMode.FULL, capturing=True)
    else:
        compiled, pool = torch.compile(module, dynamic=True), torch.cuda.graph_pool_handle()
        graphs = []
        with torch.no_grad():
            for size in reversed(SIZES):
                call, graph = tokens(size), torch.cuda.CUDAGraph()
                compiled(**call)
                with torch.cuda.graph(graph, pool=pool):
                    graphs.append((graph, compiled(**call)))
    torch.cuda.synchronize()
    return time.perf_counter() - began


def started(what: str, folder: Path, way: str) -> float:
    """Return the seconds that a start takes in a process of its own, from the built model on."""
    command = [sys.executable, __file__, what, str(folder), way]
    env = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor")}
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr)
    secs = float(done.stdout.splitlines()[-1])
    say(f"{what} with {way}, s", round(secs, 3))
    return secs


def main() -> None:
    what, folder, *rest = sys.argv[1:]
    Path(folder).mkdir(parents=True, exist_ok=True)
    if rest:
        start = {"tiny-start": tiny_start, "llama-start": llama_start}[what]
        sys.stdout.write(f"{start(Path(folder), rest[0])}\n")
    else:
        {"tiny": tiny, "llama": llama, "llama-starts": llama_starts}[what](Path(folder))


if __name__ == "__main__":
    main()

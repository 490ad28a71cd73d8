"""Measures transformers' Llama at 8B on a GPU, cold warm and ready; prints a table.

    python tests/measure_large.py FOLDER

Needs a CUDA device. Each way is a process of its own, with no GPU beside it. Cold: every cache is new, cgtool's and
torch's, for torch.compile at one static shape (its first call, without imports and the model's build) and for
`cgtool warm hf:...` (the whole command). Ready: from the built model to the end of the first call, a sync included;
the ways take turns. A step is that of one token without a key-value cache. All packages have their bytecode, as where
pip installs them: without it, importing torch and Inductor takes a process 15 s instead of 5.
"""

from __future__ import annotations

import compileall
import json
import os
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

REPO = Path(__file__).parents[1]
sys.path.insert(0, str(REPO))

import torch  # noqa: E402

SIZES = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
LLAMA = {"architectures": ["LlamaModel"], "model_type": "llama", **SIZES}
DEVICE = "cuda"
STARTS, ROUNDS, STEPS = 5, 7, 40


def say(name: str, value: object) -> None:
    sys.stdout.write(f"| {name} | {value} |\n")
    sys.stdout.flush()


def model() -> tuple[Any, dict[str, Any]]:
    """Return the model with random weights on the device, and a call of one token."""
    from transformers import AutoConfig, LlamaModel

    config = AutoConfig.from_pretrained(f"{sys.argv[1]}/model")
    with torch.device(DEVICE):
        module = LlamaModel._from_config(config, dtype=torch.bfloat16, attn_implementation="sdpa").eval()
        return module.requires_grad_(requires_grad=False), {"input_ids": torch.ones(1, 1, dtype=torch.long)}


def timed(call: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - began


def cold() -> dict[str, float]:
    module, _ = model()
    ids = torch.ones(1, 8, dtype=torch.long, device=DEVICE)
    return {"secs": timed(lambda: torch.compile(module, dynamic=False)(input_ids=ids, use_cache=False))}


def eager() -> dict[str, float]:
    module, call = model()
    return {"ready": timed(lambda: module(**call, use_cache=False))}


def loaded() -> dict[str, float]:
    module, call = model()
    taken = {}

    def start() -> None:
        began = time.perf_counter()
        import cgtool

        serve = cgtool.load(module, cache_dir=f"{sys.argv[1]}/cache")
        taken["import and load"] = time.perf_counter() - began
        serve(**call, use_cache=False)

    return {"ready": timed(start), **taken}


def steps() -> dict[str, float]:
    import cgtool

    module, call = model()
    call["use_cache"] = False
    ways = {
        "torch.compile": torch.compile(module, dynamic=False),
        "pieces": cgtool.load(module, cache_dir=f"{sys.argv[1]}/cache"),
    }
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for way in ways.values():
        for _ in range(3):
            way(**call)
    for _ in range(ROUNDS):
        for name, way in ways.items():
            taken[name].append(timed(lambda way=way: [way(**call) for _ in range(STEPS)]) / STEPS * 1e3)
    return {name: statistics.median(values) for name, values in taken.items()}


def child(way: str, **variables: str) -> dict[str, float]:
    command = [sys.executable, __file__, sys.argv[1], way]
    done = subprocess.run(command, env={**os.environ, **variables}, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    answer: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    return answer


def new_caches(folder: Path) -> dict[str, str]:
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder / "inductor"), "TRITON_CACHE_DIR": str(folder / "triton")}


def warm(folder: Path) -> dict[str, Any]:
    """Warm with every cache new; returns the report and the seconds of the whole command."""
    command = [sys.executable, "-m", "cgtool", "warm", f"hf:{folder}/model", "--device", DEVICE, "--dtype", "bfloat16"]
    command += ["--compile-sizes", "batch=1:seq=1", "--cache-dir", str(folder / "cache"), "--json"]
    began = time.perf_counter()
    done = subprocess.run(
        command, env={**os.environ, **new_caches(folder / "warm")}, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(done.stderr[-4000:])
    return {**json.loads(done.stdout), "secs": time.perf_counter() - began}


def main() -> None:
    folder = Path(sys.argv[1])
    for packages in (REPO / "cgtool", Path(torch.__file__).parents[1]):
        compileall.compile_dir(packages, quiet=2, workers=0)
    (folder / "model").mkdir(parents=True)
    (folder / "model" / "config.json").write_text(json.dumps(LLAMA))
    compiled = child("cold", **new_caches(folder / "cold"))["secs"]
    say("torch.compile, one static shape, cold, s", round(compiled, 1))
    report = warm(folder)
    for name in ("compiled", "trace_secs", "compile_secs", "secs"):
        say(f"cgtool warm, {name}", report[name])
    say("warm over torch.compile", round(report["secs"] / compiled, 2))
    both: dict[str, list[dict[str, float]]] = {"eager": [], "loaded": []}
    for _ in range(STARTS):
        for way, runs in both.items():
            runs.append(child(way))
    medians = {}
    for way, name in (("eager", "ready"), ("loaded", "ready"), ("loaded", "import and load")):
        values = [run[name] * 1e3 for run in both[way]]
        medians[way, name] = statistics.median(values)
        say(f"{way}, {name}, ms", f"{medians[way, name]:.0f} ({min(values):.0f} to {max(values):.0f})")
    say("ready over eager", round(medians["loaded", "ready"] / medians["eager", "ready"], 2))
    taken = child("steps", **new_caches(folder / "cold"))
    say("a step of one token, ms", taken)
    say("pieces over torch.compile", round(taken["pieces"] / taken["torch.compile"], 2))


if __name__ == "__main__":
    if sys.argv[2:]:
        torch.set_grad_enabled(False)
        sys.stdout.write(json.dumps(globals()[sys.argv[2]]()) + "\n")
    else:
        main()

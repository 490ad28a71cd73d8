"""On a CUDA device: warm with fake weights, load in a fresh process, and equal eager."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")

import torch

import cgtool
from cgtool.compiler.pipeline import warm
from cgtool.compiler.proof import calls

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.torch,
    pytest.mark.slow,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FIXTURES = Path(__file__).resolve().parents[2] / "fixtures"

SERVE = """
import json, sys, torch, cgtool, tiny_llama
torch.set_default_device("cuda")
spec = tiny_llama.build(dtype=torch.bfloat16)
torch.set_default_device(None)
run = cgtool.load(spec.module, cache_dir=sys.argv[1])
worst = 0.0
with torch.no_grad():
    for size in [*range(1, 65)]:
        ids = torch.randint(0, 256, (size,), device="cuda")
        positions = torch.arange(size, device="cuda")
        expected, got = spec.module(ids, positions), run(ids, positions)
        assert got.dtype == expected.dtype and got.shape == expected.shape
        worst = max(worst, (expected.float() - got.float()).abs().max().item())
    try:
        run(ids.cpu(), positions)
        refused = ""
    except cgtool.GuardError as error:
        refused = str(error)
print(json.dumps({"worst": worst, "refused": refused}))
"""


def run(*command: str, **variables: str) -> str:
    paths = os.pathsep.join([str(FIXTURES), os.environ.get("PYTHONPATH", "")])
    env = {**os.environ, "PYTHONPATH": paths, **variables}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=900, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    return done.stdout


def test_a_model_warmed_for_cuda_equals_eager_in_a_fresh_process(tmp_path):
    cache = str(tmp_path / "cache")
    command = [sys.executable, "-m", "cgtool", "warm", f"{FIXTURES / 'tiny_llama.py'}:build", "--json"]
    command += ["--device", "cuda", "--dtype", "bfloat16", "--arg", "dtype=bfloat16", "--compile-sizes", "1,8"]
    command += ["--cache-dir", cache]
    first = json.loads(run(*command))
    assert first["compiled"] == 9
    again = json.loads(run(*command))
    assert (again["compiled"], again["trace_secs"]) == (0, 0)
    served = json.loads(run(sys.executable, "-c", SERVE, cache))
    # bfloat16 has 8 bits of mantissa; eager rounds after every operation, a fused kernel once.
    assert served["worst"] < 0.1
    assert "cpu" in served["refused"]
    if torch.cuda.device_count() > 1:  # the process sees only another GPU of the same kind
        there = json.loads(run(sys.executable, "-c", SERVE, cache, CUDA_VISIBLE_DEVICES="1"))
        assert there["worst"] < 0.1


def test_variants_are_proved_while_others_compile(tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "prove_calls", None)  # would prove all of them at the end
    call = cgtool.ExampleCall(args=(torch.ones(4, 1, device="cuda"),))
    spec = cgtool.ModelSpec(module=Wide().eval().cuda(), calls=[call], dynamic={"x": {0: "rows"}})
    config = cgtool.CompilationConfig(compile_sizes=[8], jobs=2)
    general, one = warm(spec, config=config, cache_dir=tmp_path).manifest.variants
    assert {"rows": 8} in general.proved_at
    assert one.proved_at == ({"rows": 1},)


class Counts(torch.nn.Module):
    """Reads a weight and an argument, and writes to a buffer and an argument."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(32.0).view(8, 4).sin(), requires_grad=False)
        self.register_buffer("total", torch.zeros(8))

    def forward(self, x, seen):
        self.total.add_(x.sum(0))
        seen.mul_(2)
        return torch.relu(x @ self.weight) + self.total[:4], seen[1:]


def displaced(tensor):
    """Return the same values on the GPU, one element after the start of an allocation."""
    room = torch.zeros(tensor.numel() + 1, device="cuda")
    room[1:] = tensor.reshape(-1)
    return room[1:].view(tensor.shape)


def test_misaligned_tensors_are_read_and_written_to(tmp_path):
    model, eager = Counts().eval().cuda(), Counts().eval().cuda()
    rows = {0: ("rows", 2, None)}
    loaded = cgtool.compile(model, dynamic={"x": rows, "seen": rows}, cache_dir=tmp_path)
    with torch.no_grad():
        loaded(torch.ones(4, 8, device="cuda"), torch.ones(4, device="cuda"))
        eager(torch.ones(4, 8, device="cuda"), torch.ones(4, device="cuda"))
        model.weight.data, model.total = displaced(model.weight), displaced(model.total)
        with pytest.warns(UserWarning, match="weight|total"):
            loaded.recheck()
        for size in (2, 5, 33):
            ours, theirs = displaced(torch.rand(size, 8)), displaced(torch.rand(size))
            again = ours.clone(), theirs.clone()
            torch.testing.assert_close(loaded(ours, theirs), eager(*again))
            torch.testing.assert_close((theirs, model.total), (again[1], eager.total))


class Wide(torch.nn.Module):
    """Returns 4,096 numbers for each number of its argument."""

    def __init__(self):
        super().__init__()
        self.weight = torch.nn.Parameter(torch.arange(4096.0).sin().view(1, 4096), requires_grad=False)

    def forward(self, x):
        return torch.relu(x @ self.weight) + 1


def wide(tmp_path, adaptor):
    """Return a model and its compiled version."""
    model, config = Wide().eval().cuda(), cgtool.CompilationConfig(adaptor=adaptor)
    rows = {0: ("rows", 2, None)}
    return model, cgtool.compile(
        model, example_args=(torch.ones(4, 1, device="cuda"),), dynamic={"x": rows}, config=config, cache_dir=tmp_path
    )


each_adaptor = pytest.mark.parametrize("adaptor", ["aot_inductor", "inductor_standalone", "eager"])
two_devices = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


@torch.no_grad()
@each_adaptor
def test_a_call_runs_on_the_current_stream(tmp_path, adaptor):
    model, loaded = wide(tmp_path, adaptor)
    x, values = torch.zeros(64, 1, device="cuda"), torch.rand(64, 1, device="cuda")
    loaded(x)
    torch.cuda.synchronize()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(500_000_000)  # a call on another stream would read zeros meanwhile
        x.copy_(values)
        got = loaded(x)
    assert not stream.query()
    stream.synchronize()
    torch.testing.assert_close(got, model(values))


@torch.no_grad()
@each_adaptor
def test_a_call_that_runs_out_of_memory_raises_and_the_next_one_succeeds(tmp_path, adaptor):
    model, loaded = wide(tmp_path, adaptor)
    total = torch.cuda.get_device_properties(0).total_memory
    torch.cuda.set_per_process_memory_fraction(8e9 / total)
    try:
        with pytest.raises(torch.OutOfMemoryError, match=r"with rows = 500000 .*out of memory; .* take [0-9]+ MiB"):
            loaded(torch.ones(500_000, 1, device="cuda"))
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    few = torch.ones(3, 1, device="cuda")
    torch.testing.assert_close(loaded(few), model(few))


@torch.no_grad()
def test_load_and_calls_use_no_more_memory_than_eager(tmp_path):
    sys.path.insert(0, str(FIXTURES))
    import tiny_llama

    with torch.device("cuda"):
        spec = tiny_llama.build(num_layers=4, width=512, intermediate=1024)
    cgtool.compile(spec.module, example_args=spec.calls[0].args, dynamic=spec.dynamic, cache_dir=tmp_path)
    ids = torch.arange(1024, device="cuda") % 256

    def peak(call):
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        call(ids, torch.arange(1024, device="cuda"))
        return torch.cuda.max_memory_allocated() - before

    eager = [peak(spec.module) for _ in range(2)][1]
    before = torch.cuda.memory_allocated()
    loaded = cgtool.load(spec.module, cache_dir=tmp_path)
    assert torch.cuda.memory_allocated() == before
    assert max(peak(loaded) for _ in range(2)) <= 1.05 * eager
    assert torch.cuda.memory_allocated() - before < 1 << 20


@torch.no_grad()
@two_devices
@each_adaptor
def test_an_entry_of_the_first_gpu_serves_a_model_on_the_second_while_the_first_is_busy(tmp_path, adaptor):
    model, _ = wide(tmp_path, adaptor)
    there = Wide().eval().to("cuda:1")
    if adaptor == "inductor_standalone":
        with pytest.raises(cgtool.errors.ArtifactError, match="first device alone"):
            cgtool.load(there, cache_dir=tmp_path)
        return
    loaded = cgtool.load(there, cache_dir=tmp_path)
    x = torch.rand(64, 1, device="cuda:1")
    with torch.cuda.stream(torch.cuda.Stream("cuda:0")):
        torch.cuda._sleep(2_000_000_000)
        for device in (0, 1):
            with torch.cuda.device(device):
                got = loaded(x)
                assert torch.cuda.current_device() == device
            torch.cuda.current_stream(1).synchronize()
            assert got.device == x.device
            torch.testing.assert_close(got, there(x))
        assert not torch.cuda.current_stream(0).query()  # no call waited for the first GPU
    with pytest.raises(cgtool.GuardError, match="cuda:0"):
        loaded(x.to("cuda:0"))
    torch.testing.assert_close(cgtool.load(model, cache_dir=tmp_path)(x.to("cuda:0")).cpu(), there(x).cpu())


@two_devices
def test_two_ranks_over_nccl_equal_the_whole_model_with_and_without_graphs(tmp_path):
    root, model = tmp_path / "cache", FIXTURES.parent / "tests" / "e2e" / "ranks_model.py"

    def ranks(log, *arguments):
        torchrun = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--redirects", "3"]
        run(sys.executable, *torchrun, "--log-dir", str(log), *arguments)
        return [json.loads(path.read_text()) for path in sorted(log.rglob("stdout.log"))]

    options = ["--json", "--quiet", "--cache-dir", str(root), "--device", "cuda", "--arg", "device=cuda"]
    reports = ranks(tmp_path / "warm", "-m", "cgtool", "warm", f"{model}:build", *options)
    assert sorted(report["rank"] for report in reports) == [0, 1]
    assert sum(report["compiled"] for report in reports) == 3
    for rank in (0, 1):
        assert len(list(root.glob(f"torch_compile_cache/*/rank_{rank}/*/manifest.json"))) == 1
    loaded = ranks(tmp_path / "load", str(model), str(root), "cuda")
    assert loaded == [{"rank": rank, "equal": [True] * 6} for rank in (0, 1)]

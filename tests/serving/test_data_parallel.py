"""Two data-parallel ranks over gloo: padded alike, the same mode, each its own tokens."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.torch

RANK = """
import json, sys
import torch
import torch.distributed.nn  # imported later, as by Dynamo, it would hold the group, and so its threads, until the end
from torch import distributed
from serving_traffic import Cached
from cgtool.config import CompilationConfig
from cgtool.serving.batch import Request
from cgtool.serving.runner import gather_over

torch.set_num_threads(1)
meet, rank = sys.argv[1], int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=2)

def model(input_ids, positions):
    return positions[:, None] * 1.0

config = CompilationConfig(cudagraph_mode="FULL_DECODE_ONLY", cudagraph_capture_sizes=[1, 2, 4])
runner = Cached(model, "cpu", config=config, gather=gather_over(None))
runner.capture()
dispatched, plain = [], runner.execute

def execute(requests, mode, descriptor, **more):
    across = more["dp_metadata"]
    dispatched.append([mode.name, descriptor.num_tokens, list(across.num_tokens_across_dp)])
    return plain(requests, mode, descriptor, **more)

runner.execute = execute
# Rank 0 has one sequence and then none; rank 1 has three, one, and a prompt.
work = {0: [[1], [], [1]], 1: [[1, 1, 1], [1], [5]]}[rank]
rows = []
for lens in work:
    batch = [Request(token_ids=[7] * new, num_computed=2, blocks=[2 * i + 1, 2 * i + 2]) for i, new in enumerate(lens)]
    rows.append(runner.run(batch)[:, 0].tolist())
print(json.dumps({"dispatched": dispatched, "rows": rows}))
distributed.destroy_process_group()
"""


def test_two_ranks_agree_on_mode_and_padding(tmp_path):
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(Path(__file__).parent), *sys.path])}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RANK, str(tmp_path / "meet"), str(rank)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=env,
        )
        for rank in range(2)
    ]
    said = []
    for process in processes:
        out, err = process.communicate(timeout=300)
        assert process.returncode == 0, err[-3000:]
        said.append(json.loads(out.splitlines()[-1]))
    steps = [["FULL", 4, [4, 4]], ["FULL", 1, [1, 1]]]
    assert said[0] == {"dispatched": [*steps, ["NONE", 1, [1, 5]]], "rows": [[2.0], [], [2.0]]}
    assert said[1] == {"dispatched": [*steps, ["NONE", 5, [1, 5]]], "rows": [[2.0] * 3, [2.0], [2.0, 3, 4, 5, 6]]}

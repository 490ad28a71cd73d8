"""Two data-parallel ranks over gloo use the same mode and padding, each for its own tokens."""

from __future__ import annotations

from pathlib import Path

import pytest
from cli_harness import environment, torch_server

pytestmark = pytest.mark.torch

RANK = """
import json, sys
sys.path.insert(0, HERE)
import torch
import torch.distributed.nn  # imported later, as Dynamo does, it would keep the group and its threads alive
from torch import distributed
from serving_traffic import Cached
from cgtool.config import CompilationConfig
from cgtool.serving.batch import Request
from cgtool.serving.runner import gather_over

torch.set_num_threads(1)
store, rank = sys.argv[1], int(sys.argv[2])
distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)

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
# Rank 0 runs one sequence, none, and one; rank 1 runs three, one, and a prompt.
work = {0: [[1], [], [1]], 1: [[1, 1, 1], [1], [5]]}[rank]
rows = []
for lens in work:
    batch = [Request(token_ids=[7] * new, num_computed=2, blocks=[2 * i + 1, 2 * i + 2]) for i, new in enumerate(lens)]
    rows.append(runner.run(batch)[:, 0].tolist())
print(json.dumps({"dispatched": dispatched, "rows": rows}))
distributed.destroy_process_group()
"""


def test_two_ranks_agree_on_mode_and_padding(tmp_path):
    program = tmp_path / "rank.py"
    program.write_text(f"HERE = {str(Path(__file__).parent)!r}\n{RANK}")
    ranks = [
        torch_server().start(str(program), tmp_path, environment(), [str(tmp_path / "store"), str(rank)])
        for rank in range(2)
    ]
    ended = [rank.end(secs=300) for rank in ranks]
    assert [ran.code for ran in ended] == [0, 0], "".join(ran.err[-2000:] for ran in ended)
    first, second = (ran.report for ran in ended)
    steps = [["FULL", 4, [4, 4]], ["FULL", 1, [1, 1]]]
    assert first == {"dispatched": [*steps, ["NONE", 1, [1, 5]]], "rows": [[2.0], [], [2.0]]}
    assert second == {"dispatched": [*steps, ["NONE", 5, [1, 5]]], "rows": [[2.0] * 3, [2.0], [2.0, 3, 4, 5, 6]]}

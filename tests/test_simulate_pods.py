"""The simulation of pods: it loses no byte, and one seed gives one outcome."""

from __future__ import annotations

import pytest
from simulate_pods import Setup, simulate, ways


@pytest.mark.parametrize("way", ways(Setup()))
@pytest.mark.parametrize("rate", [20.0, 5_500.0])
def test_all_bytes_arrive_and_the_seed_determines_the_result(way, rate):
    setup = ways(Setup(machines=12, processes=3, rate=rate, spread=2.0))[way]
    found = simulate(setup, seed=1)
    assert found == simulate(setup, seed=1)
    assert found.sent_bytes == found.taken_bytes
    entry = (setup.first + setup.records) * setup.small_bytes + setup.artifacts * setup.artifact_bytes
    pulls = setup.machines * setup.processes
    assert found.sent_bytes <= pulls * entry
    if rate > 1000:
        assert (found.gave_up, found.refused, found.sent_bytes) == (0, 0, pulls * entry)
        assert found.requests == pulls * (setup.first + setup.records + setup.artifacts)
    else:
        assert found.refused > 0
    if setup.has_jitter:
        assert found != simulate(setup, seed=2)

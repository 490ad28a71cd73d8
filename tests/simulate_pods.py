"""Simulates pods that start at once and pull one entry from one store; prints a table. Nothing is sent anywhere.

    python tests/simulate_pods.py [--machines 10,1000,100000] [--seed 0] [--set NAME=VALUE ...]

A discrete event simulation: a request arrives at the store, and is answered or refused. The store answers `rate`
requests per second in order of arrival, and sends `store_bytes` bytes per second in total. It refuses requests that
would wait longer than `patience` seconds; these are retried after an exponential backoff, with or without jitter, up to
`attempts` times. A pull makes its first requests (listings, the index, the key) one by one, then `at_once` at a time;
its machine receives `link_bytes` bytes per second.

Measured are `first`, `records`, `artifacts` and their bytes: the requests of a load of fixtures/tiny_llama.py, four
layers, for the general shape. `at_once`, `attempts` and `backoff` are those of cgtool. Other values are assumptions:
`rate` is S3's documented rate for one prefix, `store_bytes` and `link_bytes` are networks of 100 and 10 Gbit/s.

The setups build on each other: in "a pull for each process", the processes of a machine pull independently; in "once
for a machine", one of them pulls, as `cgtool.load` does; "jitter" also spreads the starts over `spread` seconds and
randomizes the backoffs; "layers" also finds the share `shared` of the artifacts' bytes on the machine by their digests,
in the image or from an earlier entry.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True)
class Setup:
    """The parameters of a simulation.

    Args:
        machines: The number of machines.
        processes: The number of processes per machine that pull, one per GPU.
        first: Sequential requests: listings, the index, the key.
        records: Requests for the entry's other small files.
        small_bytes: The size of each of these answers.
        artifacts: The number of artifacts in the entry.
        artifact_bytes: The size of each artifact.
        at_once: The number of concurrent requests of a pull.
        rate: Requests per second that the store answers.
        store_bytes: Bytes per second that it sends.
        link_bytes: Bytes per second that a machine receives.
        latency: Seconds from a request to the first byte of its answer.
        patience: Seconds that a request may wait before the store refuses it.
        attempts: The maximum number of requests for a file.
        backoff: Seconds before the first retry.
        most_backoff: The longest backoff, in seconds.
        spread: Seconds over which jitter spreads the starts.
        shared: The part of the artifacts that layers save.
        has_jitter: Whether starts and backoffs are spread.
    """

    machines: int = 10
    processes: int = 8
    first: int = 5
    records: int = 5
    small_bytes: int = 9_400
    artifacts: int = 6
    artifact_bytes: int = 398_000
    at_once: int = 8
    rate: float = 5_500.0
    store_bytes: float = 12.5e9
    link_bytes: float = 1.25e9
    latency: float = 0.03
    patience: float = 1.0
    attempts: int = 4
    backoff: float = 0.2
    most_backoff: float = 30.0
    spread: float = 30.0
    shared: float = 0.75
    has_jitter: bool = False


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """The result of a simulation.

    Args:
        requests: The number of requests to the store.
        refused: The number of requests that it refused.
        sent_bytes: The bytes that it sent.
        taken_bytes: The bytes that machines received.
        gave_up: The number of failed pulls, whose pods start as without a store.
        ready_secs: The time at which the last of the others was complete.
    """

    requests: int
    refused: int
    sent_bytes: int
    taken_bytes: int
    gave_up: int
    ready_secs: float


def simulate(setup: Setup, seed: int) -> Outcome:
    """Return what comes of a start; the same for the same seed."""
    chance = random.Random(seed)
    pulls = setup.machines * setup.processes
    files = [setup.small_bytes] * (setup.first + setup.records) + [setup.artifact_bytes] * setup.artifacts
    asked, left = [1] * pulls, [len(files)] * pulls
    gave_up: set[int] = set()
    link_free = [0.0] * setup.machines
    answer_free = send_free = last = 0.0  # events come in order of time: the last is the latest
    requests = refused = sent = taken = 0
    events: list[tuple[float, int, int, int, int]] = []  # when, a number for the order, pull, file or -1, tries
    for pull in range(pulls):
        start = chance.uniform(0, setup.spread) if setup.has_jitter else 0.0
        events.append((start, pull, pull, 0, 0))
    heapq.heapify(events)
    number = pulls
    while events:
        now, _, pull, file, tries = heapq.heappop(events)
        if tries < 0:  # a file is here: the small ones follow each other, the artifacts go several at a time
            left[pull] -= 1
            taken += files[file]
            last = now if left[pull] == 0 else last
            more = setup.at_once if file == setup.first - 1 else 1
            for following in range(asked[pull], min(asked[pull] + more, len(files))):
                heapq.heappush(events, (now, number, pull, following, 0))
                number += 1
                asked[pull] += 1
            continue
        requests += 1
        begun = max(now, answer_free)
        if max(begun, send_free) - now > setup.patience:
            refused += 1
            if tries + 1 == setup.attempts:
                gave_up.add(pull)
                continue
            wait = min(setup.most_backoff, setup.backoff * 2**tries)
            wait *= chance.uniform(0.5, 1.5) if setup.has_jitter else 1.0
            heapq.heappush(events, (now + setup.latency + wait, number, pull, file, tries + 1))
            number += 1
            continue
        answer_free = begun + 1 / setup.rate
        send_free = max(begun, send_free) + files[file] / setup.store_bytes
        sent += files[file]
        machine = pull // setup.processes
        link_free[machine] = max(begun, link_free[machine]) + files[file] / setup.link_bytes
        here = max(send_free, link_free[machine]) + setup.latency
        heapq.heappush(events, (here, number, pull, file, -1))
        number += 1
    return Outcome(
        requests=requests,
        refused=refused,
        sent_bytes=sent,
        taken_bytes=taken,
        gave_up=len(gave_up),
        ready_secs=last,
    )


def ways(setup: Setup) -> dict[str, Setup]:
    """Return the setups that are compared, by name, each with all that the one before it has."""
    once = replace(setup, processes=1)
    spread = replace(once, has_jitter=True)
    layers = replace(spread, artifacts=round(setup.artifacts * (1 - setup.shared)))
    return {"a pull for each process": setup, "once for a machine": once, "and jitter": spread, "and layers": layers}


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--machines", default="10,1000,100000")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE")
    given = parser.parse_args()
    kinds = {field.name: type(field.default) for field in fields(Setup)}
    changes = {name: kinds[name](float(text)) for name, _, text in (pair.partition("=") for pair in given.set)}
    sys.stdout.write(
        "| machines | way | requests | turned away | gave up | GB | last ready, s |\n|---|---|---|---|---|---|---|\n"
    )
    for machines in map(int, given.machines.split(",")):
        for name, setup in ways(Setup(machines=machines, **changes)).items():
            found = simulate(setup, given.seed)
            sys.stdout.write(
                f"| {machines:,} | {name} | {found.requests:,} | {found.refused:,} | {found.gave_up:,} | "
                f"{found.sent_bytes / 1e9:,.2f} | "
                f"{found.ready_secs:,.1f} |\n"
            )
            sys.stdout.flush()


if __name__ == "__main__":
    main()

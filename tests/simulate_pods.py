"""Simulates pods that start at once and pull one entry from one store; prints a table. Nothing is sent anywhere.

    python tests/simulate_pods.py [--machines 10,1000,100000] [--seed 0] [--set NAME=VALUE ...]

Discrete events: a request arrives at the store, is answered, or is told to come again. The store answers `rate`
requests a second, sends `store_bytes` bytes a second in all, in the order of arrival, and turns away whoever would wait
longer than `patience` seconds: that one comes again after a backoff that doubles, with jitter or without, and gives up
after `attempts`. A pull makes its first requests (listings, the index, the key) one after the other, then `at_once` at
a time; its machine takes `link_bytes` bytes a second.

Measured are `first`, `records`, `artifacts` and their bytes: the requests of a load of fixtures/tiny_llama.py, four
layers, for the general shape. `at_once`, `attempts` and `backoff` are cgtool's own. All else is assumed: `rate` is what
S3 says of one prefix, `store_bytes` and `link_bytes` are networks of 100 and 10 Gbit/s.

The ways differ in what is asked for: "a pull for each process" is what processes of one machine do that do not know of
each other; "once for a machine" has one of them pull, as `cgtool.load` does; "jitter" also spreads the starts over
`spread` seconds and the backoffs; "layers" also finds `shared` of the artifacts' bytes on the machine, under their
digests: in the image, or from an entry before.
"""

from __future__ import annotations

import argparse
import heapq
import random
import sys
from dataclasses import dataclass, fields, replace


@dataclass(frozen=True, kw_only=True)
class Setup:
    """What is simulated.

    Args:
        machines: How many start.
        processes: How many processes of each pull: the GPUs of a machine.
        first: Requests that follow each other: listings, the index, the key.
        records: Requests for the entry's other small files.
        small_bytes: Bytes of each of all these.
        artifacts: How many artifacts the entry has.
        artifact_bytes: Bytes of each.
        at_once: Requests that one pull has under way.
        rate: Requests that the store answers a second.
        store_bytes: Bytes that it sends a second.
        link_bytes: Bytes that a machine takes a second.
        latency: Seconds from a request to its first byte.
        patience: Seconds that a request may wait before the store turns it away.
        attempts: How often one file is asked for.
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
    """What came of it.

    Args:
        requests: How many the store saw.
        refused: How many of them it turned away.
        sent_bytes: What it sent.
        taken_bytes: What arrived at machines.
        gave_up: How many pulls gave up: their pods start as if there were no store.
        ready_secs: When the last of the others had all of it.
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

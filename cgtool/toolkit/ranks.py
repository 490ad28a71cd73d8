"""`warm` of a model that ranks hold in parts: those that a launcher started, or all of them from one command.

Importable without torch. Launched ranks warm beside each other and meet at the end, so that one of them can speak for
all. Without a launcher each rank is warmed in its turn, in a child with that rank's environment and a process group
that exchanges nothing: one machine without GPUs fills the folders of all.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from cgtool.child import Channel
from cgtool.config import CompilationConfig
from cgtool.errors import CgtoolError
from cgtool.events import Event, OnEvent
from cgtool.host import child_variables
from cgtool.plan.grammar import Count, Record, decode, encode
from cgtool.processes import Child, ChildEndedError, format_log
from cgtool.toolkit.model_choice import ModelChoice
from cgtool.toolkit.warm import RankSummary, WarmReport, warm

_FAKED = (
    "As whole calls were proved, ranks exchanged nothing: their process group was faked. Warm under torchrun to prove "
    "calls with what ranks exchange."
)


_IN_GROUP = (
    "\nUnder --world-size, cgtool has made the default process group. Have the factory make one only where there is "
    "none: `if not torch.distributed.is_initialized():`."
)


class _Request(Record, frozen=True, kw_only=True):
    """The rank that a child is to warm."""

    choice: ModelChoice
    config: dict[str, Any]
    rank: Count
    size: Count
    check: bool


class _Progress(Record, frozen=True, kw_only=True):
    event: Event


class _Outcome(Record, frozen=True, kw_only=True):
    """What came of a rank: its report, or why there is none."""

    report: WarmReport | None = None
    failure: str = ""
    exit_code: int = 1


class RankFailedError(CgtoolError):
    """A rank could not be warmed."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def warm_with_others(choice: ModelChoice, *, config: CompilationConfig, check: bool, on_event: OnEvent) -> WarmReport:
    """Warm this process's rank beside those that its launcher started; the report has a summary of each.

    Raises:
        RankLostError: Another rank failed or died.
        CgtoolError: As `warm`.
    """
    from cgtool.compiler.ranks import Ranks  # torch

    ranks = Ranks.of_launch()
    if ranks is None:
        return warm(choice, config=config, check=check, on_event=on_event)
    with ranks:
        report = warm(choice, config=config, check=check, ranks=ranks, on_event=on_event)
        words = ranks.meet("the report", encode(RankSummary.of(ranks.rank, report)).decode(), insists=True)
    return dataclasses.replace(report, ranks=tuple(decode(word.encode(), RankSummary) for word in words))


def warm_all(
    choice: ModelChoice,
    size: int,
    *,
    config: CompilationConfig,
    check: bool,
    on_event: OnEvent,
) -> WarmReport:
    """Warm every rank of a model that `size` ranks hold; return rank 0's report, with a summary of each.

    Raises:
        RankFailedError: A rank could not be warmed; those before it are.
    """
    reports = []
    for rank in range(size):
        request = _Request(
            choice=choice,
            config=config.to_json(),
            rank=rank,
            size=size,
            check=check,
        )
        reports.append(_warmed(request, on_event))
    summaries = tuple(RankSummary.of(rank, report) for rank, report in enumerate(reports))
    notes = reports[0].notes if check or not config.proof else (*reports[0].notes, _FAKED)
    return dataclasses.replace(reports[0], notes=notes, ranks=summaries)


def _warmed(request: _Request, on_event: OnEvent) -> WarmReport:
    rank, size = str(request.rank), str(request.size)
    places = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    child = Child("cgtool.toolkit.ranks:main", variables=child_variables(places))
    try:
        answer = child.ask(
            request,
            answer=_Outcome,
            note=_Progress,
            on_note=lambda told: on_event(told.event._replace(message=f"rank {rank}: {told.event.message}")),
            timeout_secs=None,
        )
    except ChildEndedError as error:
        msg = f"The process that warms rank {rank} {error.ending.how}.{format_log(error.ending.log)}"
        raise RankFailedError(msg) from error
    finally:
        child.close()
    outcome: _Outcome = answer.record
    if outcome.report is None:
        raise RankFailedError(f"Rank {rank} of {size}: {outcome.failure}", outcome.exit_code)
    return outcome.report


def main(channel: Channel) -> None:
    """Warm one rank; the program of a child."""
    from cgtool.guards._torch import join_fake_group  # torch

    for request, _ in channel.requests(_Request):
        join_fake_group(request.rank, request.size)
        try:
            report = warm(
                request.choice,
                config=CompilationConfig.from_mapping(request.config),
                check=request.check,
                in_children=False,  # which would have to join the group
                on_event=lambda event: channel.note(_Progress(event=event)),
            )
        except CgtoolError as error:
            advice = _IN_GROUP if "default process group twice" in str(error) else ""
            channel.answer(_Outcome(failure=f"{error}{advice}", exit_code=error.exit_code))
        else:
            channel.answer(_Outcome(report=report))

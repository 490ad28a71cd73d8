"""`warm` for a model split across ranks: the ranks of a launcher, or all ranks from one command.

Importable without torch. Launched ranks warm concurrently and synchronize at the end, so that one of them reports for
all. Without a launcher, the ranks are warmed one after the other, each in a child process with that rank's environment
and a fake process group, so that one machine without GPUs fills the folders of all ranks.
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

_FAKE_GROUP_NOTE = (
    "Whole calls were proved with a fake process group, without communication between ranks. Warm under torchrun to "
    "prove calls with it."
)
_GROUP_EXISTS_ADVICE = (
    "\nUnder --world-size, cgtool creates the default process group. Let the factory create one only if none exists: "
    "`if not torch.distributed.is_initialized():`."
)


class _Request(Record, frozen=True, kw_only=True):
    """The rank for a child to warm."""

    choice: ModelChoice
    config: dict[str, Any]
    rank: Count
    size: Count
    check: bool


class _Progress(Record, frozen=True, kw_only=True):
    event: Event


class _Outcome(Record, frozen=True, kw_only=True):
    """The result for a rank: its report, or why warming failed."""

    report: WarmReport | None = None
    failure: str = ""
    exit_code: int = 1


class RankFailedError(CgtoolError):
    """A rank could not be warmed."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def warm_launched(choice: ModelChoice, *, config: CompilationConfig, check: bool, on_event: OnEvent) -> WarmReport:
    """Warm this process's rank concurrently with the other launched ranks; the report has a summary of each.

    Raises:
        RankLostError: Another rank failed or died.
        CgtoolError: As for `warm`.
    """
    from cgtool.compiler.ranks import Ranks  # imported lazily: needs torch

    ranks = Ranks.of_launch()
    if ranks is None:
        return warm(choice, config=config, check=check, on_event=on_event)
    with ranks:
        report = warm(choice, config=config, check=check, ranks=ranks, on_event=on_event)
        summaries = ranks.meet("the report", encode(RankSummary.of(ranks.rank, report)).decode(), insists=True)
    return dataclasses.replace(report, ranks=tuple(decode(text.encode(), RankSummary) for text in summaries))


def warm_all_ranks(
    choice: ModelChoice,
    size: int,
    *,
    config: CompilationConfig,
    check: bool,
    on_event: OnEvent,
) -> WarmReport:
    """Warm every rank of a model split across `size` ranks; return rank 0's report, with a summary of each.

    Raises:
        RankFailedError: A rank could not be warmed; the ranks before it are warmed.
    """
    reports = []
    for rank in range(size):
        request = _Request(choice=choice, config=config.to_json(), rank=rank, size=size, check=check)
        reports.append(_warm_in_child(request, on_event))
    summaries = tuple(RankSummary.of(rank, report) for rank, report in enumerate(reports))
    notes = reports[0].notes if check or not config.proof else (*reports[0].notes, _FAKE_GROUP_NOTE)
    return dataclasses.replace(reports[0], notes=notes, ranks=summaries)


def _warm_in_child(request: _Request, on_event: OnEvent) -> WarmReport:
    rank, size = str(request.rank), str(request.size)
    variables = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
    child = Child("cgtool.toolkit.ranks:main", variables=child_variables(variables))
    try:
        answer = child.ask(
            request,
            answer=_Outcome,
            note=_Progress,
            on_note=lambda note: on_event(note.event._replace(message=f"rank {rank}: {note.event.message}")),
            timeout_secs=None,
        )
    except ChildEndedError as error:
        message = f"The process that warms rank {rank} {error.ending.how}.{format_log(error.ending.log)}"
        raise RankFailedError(message) from error
    finally:
        child.close()
    outcome: _Outcome = answer.record
    if outcome.report is None:
        raise RankFailedError(f"Rank {rank} of {size}: {outcome.failure}", outcome.exit_code)
    return outcome.report


def main(channel: Channel) -> None:
    """Warm one rank; the program of a child."""
    from cgtool.guards._torch import join_fake_group  # imported lazily: needs torch

    for request, _ in channel.requests(_Request):
        join_fake_group(request.rank, request.size)
        try:
            report = warm(
                request.choice,
                config=CompilationConfig.from_mapping(request.config),
                check=request.check,
                in_children=False,  # children would have to join the fake group
                on_event=lambda event: channel.note(_Progress(event=event)),
            )
        except CgtoolError as error:
            advice = _GROUP_EXISTS_ADVICE if "default process group twice" in str(error) else ""
            channel.answer(_Outcome(failure=f"{error}{advice}", exit_code=error.exit_code))
        else:
            channel.answer(_Outcome(report=report))

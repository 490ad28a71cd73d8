"""Finding the entry that serves a model, without tracing it, and saying why none does.

The way of ccache's direct mode: cheap facts lead to candidates; a candidate's factors are compared with those of
this process, its traced files with the files as they are now, its guards with the live model. What differs becomes a
sentence.

The compiler is a factor because it decides what `warm` compiles, and what Inductor's own artifacts are built with as
they are opened. So a compiler of another version is a miss, whatever the adaptor: whoever changed it, to be rid of a
fault of the old one say, must not be served what the old one made. A machine that has none says nothing about it: it
can make nothing else of the model, and what was compiled elsewhere is what it is there to run.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from cgtool.cache.entry import Entry, read_entry
from cgtool.cache.files import telling
from cgtool.cache.key import FactorDifference, Key, difference_between, read_key, sentences
from cgtool.cache.layout import PLAN_FILE, CacheLayout, RankName, short
from cgtool.cache.leases import keep
from cgtool.cache.lookup import LookupStore
from cgtool.cache.trust import TrustPolicy
from cgtool.errors import CacheError, CacheMissError, CacheSchemaError, CgtoolError, RefusedError
from cgtool.guards.files import sources_now
from cgtool.guards.ops import op_digest
from cgtool.guards.sources import Roots
from cgtool.guards.table import failures_of
from cgtool.pieces import Json
from cgtool.plan import Plan, parse_plan
from cgtool.records import dataclass
from cgtool.runtime.facts import Facts
from cgtool.runtime.weights import is_weight, tensor_differences

_log = logging.getLogger(__name__)

#: Factors that are compared as they stand; "guards" and "calls" come of the trace and are checked through the plan.
_FROM_TRACE = frozenset({"guards", "calls", "sources", "ops", "config"})
#: Compared where there is one.
_COMPILER = "compiler"
#: How many reasons a miss tells, and how many other entries it looks at to find the nearest.
_MAX_REASONS = 12
_MAX_LOOKED_AT = 256


@dataclass(frozen=True, kw_only=True)
class Found:
    """An entry that serves the model: its files, its plan, and what it was keyed on."""

    entry: Entry
    key: Key
    plan: Plan


class Finder:
    """Looks for the entry of one model in one cache.

    Args:
        layout: Where the cache lies.
        module: The live model.
        facts: Its facts.
        config: Key fields that the entry must have been compiled with; None takes any.
        rank: Which process of a model-parallel group.
        prefix: Which compiled part of the model.
        exact_config: Whether splitting ops that `config` leaves open must have been left open by the entry too.
        trust: What an entry must be before anything of it is used; None asks nothing, for who uses nothing of it.
        only_asks: Whether nothing will be used of what is found: then nothing is held, and no miss is counted.
    """

    def __init__(
        self,
        layout: CacheLayout,
        module: Any,
        facts: Facts,
        *,
        config: Mapping[str, Json] | None,
        rank: int,
        prefix: str,
        exact_config: bool = False,
        trust: TrustPolicy | None = None,
        only_asks: bool = False,
    ) -> None:
        self._trust = trust
        self._only_asks = only_asks
        self._refused: RefusedError | None = None
        self._exact_config = exact_config
        self._gone: set[str] = set()
        self._other_schema: CacheSchemaError | None = None
        self._layout = layout
        self._module = module
        self._facts = facts
        self._config = config
        self._rank = rank
        self._prefix = prefix

    def find(self, accept: Callable[[Found], tuple[str, ...]] = lambda _: ()) -> Found:
        """Return the newest entry that serves the model.

        Args:
            accept: Asked of each entry that fits; sentences that it returns turn it away.

        Raises:
            CacheMissError: There is none; its reasons say why, those of the nearest entry.
            RefusedError: There is one that may not be trusted, and none that may.
            CacheSchemaError: What is there was written by another version of cgtool.
            CacheError: The cache cannot be read.
        """
        fitting: list[Found] = []
        refused: list[tuple[str, tuple[str, ...]]] = []
        try:
            looked = [(hash_, *self._look(hash_)) for hash_ in LookupStore(self._layout).candidates(self._facts.lookup)]
        finally:
            _ = self._compiler_now  # whoever was asked is waited for
        for hash_, found, reasons in looked:
            if found is not None and not reasons:
                reasons = accept(found)  # noqa: PLW2901 - what it says is the reason from here on
            if found is not None and not reasons:
                fitting.append(found)
            elif reasons:
                refused.append((hash_, reasons))
        if fitting:
            found = _newest(fitting)
            if self._only_asks or keep(self._layout, found.entry.name):
                return found  # from here on prune leaves it alone
            self._gone.add(found.entry.name.hash)  # one was quicker
            return self.find(accept)
        if self._refused is not None:
            raise self._refused
        if self._other_schema is not None:
            raise self._other_schema
        raise self._miss(refused)

    def _look(self, hash_: str) -> tuple[Found | None, tuple[str, ...]]:
        """Return the entry, or why it does not serve; (None, ()) when it has nothing for this rank and prefix."""
        name = RankName(hash=hash_, rank=self._rank, prefix=self._prefix)
        if hash_ in self._gone:
            return None, ()
        try:
            key = read_key(self._layout, hash_)
            with telling(self._layout.manifest_file(name)):
                if key is None or not self._layout.manifest_file(name).exists():
                    return None, ()
            trusted = None if self._trust is None else self._trust.check(self._layout, name, key)
            if self._differs(key):
                return None, self._differences(key)
            entry = trusted or read_entry(self._layout, name)
            if entry is None:
                return None, ()
            plan = parse_plan(entry.files[PLAN_FILE], path=self._layout.rank_dir(name) / PLAN_FILE)
        except RefusedError as error:
            self._refused = error
            return None, (str(error),)
        except CacheSchemaError as error:
            self._other_schema = error  # told only when no entry of this version serves
            return None, (str(error),)
        except CacheError as error:
            return None, (str(error),)
        # By now the compiler has had time to answer.
        return Found(entry=entry, key=key, plan=plan), self._guards(plan) or sentences(self._compiler(key))

    def _differs(self, key: Key) -> bool:
        """Return whether the entry's factors differ from this process in anything but the compiler."""
        return bool(self._but_compiler(key))

    def _differences(self, key: Key) -> tuple[str, ...]:
        """Return what differs between the entry's factors and this process, the most telling first."""
        return sentences(self._but_compiler(key) + self._compiler(key))

    def _but_compiler(self, key: Key) -> list[FactorDifference]:
        found: list[FactorDifference] = []
        sources, ops = key.value("sources") or {}, key.value("ops") or {}
        found += difference_between("sources", sources, sources_now(sources))
        found += difference_between("ops", ops, _ops_now(ops))
        if self._config is not None:
            found += difference_between("config", *self._asked(key.value("config") or {}, self._config))
        for factor in key.factors:
            now = self._facts.known.get(factor.name)
            if factor.name not in _FROM_TRACE and factor.name != _COMPILER and not _equal(factor.value, now):
                found += difference_between(factor.name, factor.value, now)
        return found

    def _compiler(self, key: Key) -> list[FactorDifference]:
        now = self._compiler_now
        named = any(factor.name == _COMPILER for factor in key.factors)
        return [] if now is None or not named else list(difference_between(_COMPILER, key.value(_COMPILER), now))

    @functools.cached_property
    def _compiler_now(self) -> str | None:
        return self._facts.compiler

    def _asked(self, stored: Mapping[str, Json], asked: Mapping[str, Json]) -> tuple[Json, Json]:
        """Return both sides of the configuration; splitting ops that were not asked for need not be compared."""
        left_out = {"splitting_ops"} if asked.get("splitting_ops") is None and not self._exact_config else set()
        kept, wanted = ({n: v for n, v in side.items() if n not in left_out} for side in (stored, asked))
        return kept, wanted

    def _guards(self, plan: Plan) -> tuple[str, ...]:
        method = getattr(self._module, plan.method, None)
        if method is None:
            return (f"The model has no method {plan.method} now.",)
        roots = Roots(self._module, method)
        failures = failures_of((variant.model_guards for variant in plan.variants), roots)
        if failures:
            return tuple(failure.sentence for failure in failures)
        # Parameters and buffers are among the facts; what is left is tensors that lie about as plain attributes.
        known = self._facts.known["state"]["tensors"]
        inputs = {item.source: item for variant in plan.variants for item in variant.inputs}
        others = [item for source, item in inputs.items() if source[5:] not in known or source[:5] != "self."]
        return tuple(tensor_differences(roots, filter(is_weight, others)))

    def _miss(self, refused: list[tuple[str, tuple[str, ...]]]) -> CacheMissError:
        # Kept off the way of a hit.
        from cgtool.cache.prune import record

        pruned = (record.pruned if self._only_asks else record.count_miss)(self._layout, self._facts.lookup)
        if not refused:
            refused = self._others()
        if not refused:
            msg = (
                f"There is nothing for this model in {self._layout.root} (rank {self._rank}, prefix {self._prefix!r}). "
                "Warm it first: `cgtool warm MODEL`, or call cgtool.compile."
            )
            reason = "nothing has been warmed for this model" if pruned is None else pruned.sentence
            return CacheMissError(msg, reasons=(reason,), path=self._layout.root)
        hash_, reasons = min(refused, key=lambda pair: len(pair[1]))
        shown = "\n  ".join(reasons[:_MAX_REASONS])
        msg = (
            f"No entry of {self._layout.root} fits this model. The nearest, {short(hash_)}, does not because:\n"
            f"  {shown}\n{self._advice()}"
        )
        return CacheMissError(msg, reasons=reasons[:_MAX_REASONS], path=self._layout.root, nearest=hash_)

    def _advice(self) -> str:
        tensors = self._facts.known["state"]["tensors"]
        if any(" meta" in spelled for spelled in tensors.values()):
            return (
                "Tensors on the meta device have no memory: give them some (module.to_empty(device=...), then "
                "load_state_dict) before the model is loaded."
            )
        return "Warm the model again as it is now, or undo the change."

    def _others(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return entries that the facts did not lead to and that are of a model of the same class."""
        found: list[tuple[str, tuple[str, ...]]] = []
        for hash_ in self._layout.hashes()[:_MAX_LOOKED_AT]:
            name = RankName(hash=hash_, rank=self._rank, prefix=self._prefix)
            try:
                key = read_key(self._layout, hash_)
            except CacheError:
                continue
            if key is None or not self._layout.manifest_file(name).exists():
                continue
            if key.value("model") == self._facts.known["model"]:
                found.append((hash_, self._differences(key)))
        return [(hash_, reasons) for hash_, reasons in found if reasons]


def _equal(one: Json, other: Json) -> bool:
    """Return whether two values are equal as data: to compare two digests of a big factor costs milliseconds."""
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_equal(value, other[name]) for name, value in one.items())
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_equal, one, other))
    return bool(one == other)


def _ops_now(ops: Mapping[str, str]) -> dict[str, Json]:
    now: dict[str, Json] = {}
    for name in ops:
        try:
            now[name] = op_digest(name)
        except CgtoolError:
            now[name] = None
    return now


def _newest(fitting: list[Found]) -> Found:
    ordered = sorted(fitting, key=lambda found: found.entry.manifest.created, reverse=True)
    if len(ordered) > 1:
        others = ", ".join(short(found.entry.name.hash) for found in ordered[1:])
        taken = short(ordered[0].entry.name.hash)
        _log.info("%d entries serve this model; the newest, %s, is taken (also: %s).", len(ordered), taken, others)
    return ordered[0]

"""Find the cache entry for a model without tracing it, and open the entry as a callable.

The lookup works like ccache's direct mode. A digest of cheap facts (the lookup key) leads to candidate entries. For
each candidate, the factors of its key are compared with this process, the source files it was traced from with the
files on disk, and its guards with the live model. Each difference is reported as a sentence.

The C++ compiler is a factor because it decides what `warm` compiles, and because Inductor's own artifacts are built
with it when they are opened. A different compiler version is therefore a miss for every adaptor: a user who replaces a
faulty compiler must not be served its output. A machine without a compiler ignores this factor: it exists to run what
was compiled elsewhere, and could not compile anything else.

All artifacts are read and their digests verified at load, and the verified bytes are the ones that are opened. An
artifact is opened when a call first selects it, so that start-up pays only for what is used. The artifacts of the first
variant that serve all its sizes are opened at load, so that a machine that cannot open any fails at start-up.
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import msgspec
import torch
from msgspec.structs import replace

from cgtool import host
from cgtool.errors import ArtifactError, CacheError, CacheMissError, CacheSchemaError, RefusedError
from cgtool.graph.expressions import rename, symbols_of
from cgtool.guards._torch import process_group_is_initialized, register_groups
from cgtool.guards.sources import Roots, SourceError, leads_to
from cgtool.guards.table import failures_of
from cgtool.plan.pieces import AOT_INDUCTOR, EAGER, Json, PieceGraph
from cgtool.plan.records import GuardTable, Plan, Step, Variant, parse_plan
from cgtool.plan.shapes import dispatch_order
from cgtool.runtime.aoti_package import Packages
from cgtool.runtime.call import LoadedModel
from cgtool.runtime.dispatch import Bounds, Boxed, Choice, PiecewiseBackend, Unopened, graph_at, symbol_bounds
from cgtool.runtime.factors import Live, differences_now
from cgtool.runtime.op_by_op import checked_function
from cgtool.runtime.weights import first_index, is_weight, tensor_differences
from cgtool.store.artifacts import code_of
from cgtool.store.entry import Entry
from cgtool.store.layout import PLAN_FILE, CacheLayout, RankName, short
from cgtool.store.leases import keep
from cgtool.store.lookup import LookupStore
from cgtool.store.records import Key, parse_key
from cgtool.store.trust import REASONS, Records, TrustPolicy, resolved

#: Adaptors whose code hard-codes the index of the device it was compiled on.
_FIRST_DEVICE_ONLY = frozenset({"inductor", "inductor_standalone"})
#: The most reasons that a miss reports, and the most other entries that it compares to find the nearest.
_MAX_REASONS = 12
_MAX_COMPARED = 256


class MatchedEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A cache entry that matches the model, with its parsed key and plan."""

    entry: Entry
    key: Key
    plan: Plan


def rank_here() -> int:
    """Return this process's rank: from the launcher's variables, else from the default process group, else 0."""
    if process_group_is_initialized() and not any(host.variables_now(("RANK", "LOCAL_RANK")).values()):
        return torch.distributed.get_rank()
    return host.environment().rank


class Finder:
    """Searches one cache for the entry of one model.

    Args:
        layout: The layout of the cache.
        module: The live model.
        live: The current factors of the model and of this process.
        rank: The rank of this process in a model-parallel group.
        prefix: The compiled part of the model.
        trust: The policy that an entry must satisfy before any of it is interpreted.
        query_only: True for queries (`why`, `--check`) that will not use the entry: no lease is taken and no miss is
            counted.
    """

    def __init__(
        self,
        layout: CacheLayout,
        module: Any,
        live: Live,
        *,
        rank: int,
        prefix: str,
        trust: TrustPolicy,
        query_only: bool = False,
    ) -> None:
        self._trust = trust
        self._query_only = query_only
        self._untrusted: list[RefusedError] = []
        self._other_schema: CacheSchemaError | None = None
        # Resolved once: someone able to change a symlink could show the policy one folder and the reader another.
        self._layout = CacheLayout(root=resolved(layout.root))
        self._module = module
        self._live = live
        self._rank = rank
        self._prefix = prefix

    def find(self, accept: Callable[[MatchedEntry], tuple[str, ...]] = lambda _: ()) -> MatchedEntry:
        """Return the entry that matches the model; if several do, the one published or completed last.

        Args:
            accept: Called for each matching entry; returns the reasons to reject it, or an empty tuple.

        Raises:
            CacheMissError: No entry matches. Its reasons are those of the nearest entry.
            RefusedError: An entry is not trusted, and no trusted entry matches.
            CacheSchemaError: The entries were written by another version of cgtool.
            CacheError: The cache cannot be read.
        """
        refused: list[tuple[str, tuple[str, ...]]] = []
        try:
            for hash_ in LookupStore(self._layout).candidates(self._live.lookup):
                found, reasons = self._look(hash_)
                if found is not None:
                    reasons = accept(found)
                    # Take a lease so that prune keeps the entry; prune may have removed it already.
                    if not reasons and (self._query_only or keep(self._layout, found.entry.name)):
                        return found
                if reasons:
                    refused.append((hash_, reasons))
        finally:
            host.compiler_version()  # waits for the child process that `Live.of` started
        raise self._failure(refused)

    @property
    def lookup(self) -> str:
        """The digest of the model's cheap facts."""
        return self._live.lookup

    def fits(self, key: Key) -> bool:
        """Return whether a key matches the model and this process."""
        return not differences_now(key, self._live)

    def at(self, hash_: str) -> MatchedEntry:
        """Return the entry with this hash.

        Raises:
            CacheMissError: It does not match the model, or it was removed. Otherwise as `find`.
        """
        found, reasons = self._look(hash_)
        if found is not None and keep(self._layout, found.entry.name):
            return found
        raise self._failure([(hash_, reasons or ("it was removed in the meantime",))])

    def _look(self, hash_: str) -> tuple[MatchedEntry | None, tuple[str, ...]]:
        """Return the entry, or why it does not match; (None, ()) if it has no files for this rank and prefix."""
        name = RankName(hash=hash_, rank=self._rank, prefix=self._prefix)
        try:
            records = self._trust.read(self._layout, name)
            if records is None:
                return None, ()
            key = self._key(hash_, records)
            if differences_now(key, self._live, when="first"):
                return None, differences_now(key, self._live)
            entry = self._trust.entry(self._layout, name, records)
            if entry is None:
                return None, ()
            plan = parse_plan(entry.files[PLAN_FILE], path=self._layout.rank_dir(name) / PLAN_FILE)
        except RefusedError as error:
            self._untrusted.append(error)
            return None, (str(error),)
        except CacheSchemaError as error:
            self._other_schema = error  # reported only if no entry of this version matches
            return None, (str(error),)
        except CacheError as error:
            return None, (str(error),)
        # Last, to give the compiler's child process time to finish.
        reasons = self._guards(plan) or differences_now(key, self._live, when="last")
        return (None, reasons) if reasons else (MatchedEntry(entry=entry, key=key, plan=plan), ())

    def _key(self, hash_: str, records: Records) -> Key:
        return parse_key(records.key, path=self._layout.key_file(hash_), hash_=hash_)

    def _guards(self, plan: Plan) -> tuple[str, ...]:
        method = getattr(self._module, plan.method, None)
        if method is None:
            return (f"the model no longer has a method {plan.method}",)
        tables = [variant.model_guards for variant in plan.variants]
        roots = Roots(self._module, method)
        if isinstance(tables[0], GuardTable) and "transformers.utils.output_capturing" in sys.modules:
            from cgtool.guards.transformers import install_hooks, models_with_hooks  # imported lazily: rarely needed

            with contextlib.suppress(SourceError):
                for source in models_with_hooks(tables[0].texts.whole):  # all variants of a plan share their texts
                    install_hooks(roots.resolve(source))
        failures = failures_of(tables, roots)
        if failures:
            return tuple(failure.sentence for failure in failures)
        # The key covers parameters and buffers; what remains are tensors held as plain attributes.
        known = self._live.known["state"]["tensors"]
        inputs = {item.source: item for variant in plan.variants for item in variant.inputs}
        kept = {write.place for variant in plan.variants for write in variant.kept}
        others = [
            item
            for source, item in inputs.items()
            if not leads_to(source, kept) and (source[5:] not in known or source[:5] != "self.")
        ]
        return tuple(tensor_differences(roots, filter(is_weight, others)))

    def _failure(self, refused: list[tuple[str, tuple[str, ...]]]) -> Exception:
        """Return the most informative error: an untrusted entry before one of another version before a miss."""
        if self._untrusted:
            return max(
                self._untrusted, key=lambda error: REASONS.index(error.reason) if error.reason in REASONS else -1
            )
        if self._other_schema is not None:
            return self._other_schema
        return self._miss(refused)

    def _miss(self, refused: list[tuple[str, tuple[str, ...]]]) -> CacheMissError:
        from cgtool.store import pruned as prune_record  # imported lazily: a hit does not need it

        pruned = (prune_record.pruned if self._query_only else prune_record.count_miss)(self._layout, self._live.lookup)
        refused = refused or self._same_class()
        where = f"{self._layout.root} (rank {self._rank}, prefix {self._prefix!r})"
        if not refused:
            reason = self._other_ranks()
            advice = (
                "If each rank holds a part of the model, warm every rank (`torchrun ... -m cgtool warm MODEL`, or "
                "`--world-size N`); if each rank holds all of it, load with rank=0."
            )
            if not reason:
                reason = "nothing has been warmed for this model" if pruned is None else pruned.sentence
                advice = "Warm it first: run `cgtool warm MODEL`, or call cgtool.compile."
            msg = f"The cache {where} has no entry for this model: {reason.rstrip('.')}. {advice}"
            return CacheMissError(msg, reasons=(reason,), path=self._layout.root)
        hash_, reasons = min(refused, key=lambda pair: len(pair[1]))
        shown = "\n  ".join(reasons[:_MAX_REASONS])
        more = f"\n  and {len(reasons) - _MAX_REASONS} more" if len(reasons) > _MAX_REASONS else ""
        msg = (
            f"No entry in the cache {where} matches this model. The nearest entry, {short(hash_)}, differs:\n"
            f"  {shown}{more}\n{self._advice(reasons)}"
        )
        return CacheMissError(msg, reasons=reasons[:_MAX_REASONS], path=self._layout.root, nearest=hash_)

    def _other_ranks(self) -> str:
        """Return a clause that lists the other ranks the model was warmed for, or "" if there are none."""
        hashes = LookupStore(self._layout).candidates(self._live.lookup)
        names = (name for hash_ in hashes for name in self._layout.rank_names(hash_) if name.prefix == self._prefix)
        ranks = sorted({name.rank for name in names if self._layout.manifest_file(name).exists()} - {self._rank})
        if not ranks:
            return ""
        listed = ", ".join(map(str, ranks))
        return f"it was warmed for rank{'s' * (len(ranks) > 1)} {listed}, not for rank {self._rank}"

    def _advice(self, reasons: tuple[str, ...]) -> str:
        tensors = self._live.known["state"]["tensors"]
        if any(" meta" in spelled for spelled in tensors.values()):
            return (
                "Tensors on the meta device have no storage. Materialize the model before loading it: "
                "module.to_empty(device=...), then load_state_dict."
            )
        if any(reason.startswith("model.class was ") for reason in reasons):
            return (
                "A class is identified by the module it is imported from. Import it under the same name as when the "
                "model was warmed, or warm it under the name used here (`cgtool warm MODULE:FACTORY`)."
            )
        return "Warm the model again, or undo the change."

    def _same_class(self) -> list[tuple[str, tuple[str, ...]]]:
        """Return entries that the lookup key missed and that belong to a model of the same class, with their reasons.

        A class of the same name in another module counts if its tensors are equal: one file may be imported under
        several names.
        """
        known = self._live.known
        found: list[tuple[str, tuple[str, ...]]] = []
        for hash_ in self._layout.hashes()[:_MAX_COMPARED]:
            name = RankName(hash=hash_, rank=self._rank, prefix=self._prefix)
            try:
                records = self._trust.read(self._layout, name)
                key = None if records is None else self._key(hash_, records)
            except (CacheError, RefusedError):
                continue
            if key is None:
                continue
            has_same_name = _class_name(key.value("model")) == _class_name(known["model"])
            if key.value("model") == known["model"] or (has_same_name and key.value("state") == known["state"]):
                found.append((hash_, differences_now(key, self._live)))
        return [(hash_, reasons) for hash_, reasons in found if reasons]


def _class_name(model: Json) -> str | None:
    """Return the class's name within its module; None for a factor that another cgtool version wrote differently."""
    named = model.get("class") if isinstance(model, dict) else None
    return named.partition(":")[2] if isinstance(named, str) else None


#: Opens an artifact as a function: (adaptor, bytes, the piece's graph at the artifact's shape).
Opener = Callable[[str, bytes, PieceGraph], Boxed]


def open_entry(match: MatchedEntry, module: Any, opener: Opener, *, recheck_calls: bool = False) -> LoadedModel:
    """Open an entry as a callable that serves `module`.

    Args:
        match: The entry.
        module: The live model.
        opener: Opens an artifact of an adaptor that needs more than torch; artifacts of `aot_inductor` and `eager` are
            opened here.
        recheck_calls: Whether each call checks all live objects, as `recheck` does.

    Raises:
        CacheCorruptError: An artifact's bytes differ from their digest.
        ArtifactError: An artifact cannot be opened on this machine or for the model's device, or a piece has no
            artifact. A call that is the first to select an artifact may raise it too.
        GuardError: A tensor of the model has a different dtype, shape or layout than when it was compiled.
    """
    register_groups()
    index = first_index(module, match.plan)
    if index and (adaptors := sorted({row.adaptor for row in match.entry.manifest.rows} & _FIRST_DEVICE_ONLY)):
        msg = (
            f"Code compiled by {adaptors[0]} runs on the first visible device only, and this model is on device "
            f"{index}. Set CUDA_VISIBLE_DEVICES={index} for this process, or warm with aot_inductor."
        )
        raise ArtifactError(msg, path=match.entry.name.hash, expected=0, actual=index)
    plan = match.plan
    with Packages(device_index=index) as packages:

        def open_now(adaptor: str, code: bytes, step: Step, bounds: Bounds) -> Boxed:
            graph = graph_at(plan.graphs[step.graph], step, bounds)
            if adaptor == EAGER:
                return checked_function(graph, device_index=index)
            return packages.open(code, graph) if adaptor == AOT_INDUCTOR else opener(adaptor, code, graph)

        pieces = _pieces(match, open_now)
        return LoadedModel(
            module,
            _with_added_guards(plan, pieces),
            {place: _backend(choices) for place, choices in pieces.items()},
            device_index=index,
            variables=match.key.value("variables"),
            recheck_calls=recheck_calls,
        )


def _pieces(
    match: MatchedEntry, open_now: Callable[[str, bytes, Step, Bounds], Boxed]
) -> dict[tuple[int, int], list[Choice]]:
    """Return the choices for each piece of each variant, by (variant, piece), in order of preference."""
    opened: dict[tuple[str, str, str, str], tuple[Unopened, tuple[str, ...]]] = {}
    pieces: dict[tuple[int, int], list[Choice]] = {}
    plan, manifest = match.plan, match.entry.manifest
    read = match.entry.artifacts(row.artifact for row in manifest.rows)
    steps = [{step.piece: step for step in variant.steps} for variant in plan.variants]
    for row in sorted(manifest.rows, key=lambda row: (dispatch_order(row.shape), not row.tuned)):
        step = steps[row.variant].get(row.piece_index) if row.variant < len(steps) else None
        if step is None:
            msg = (
                f"The manifest lists piece {row.piece_index} of variant {row.variant}, which is not in the plan. "
                "Warm the model again."
            )
            raise ArtifactError(msg, path=match.entry.name.hash)
        bounds = symbol_bounds(plan.variants[row.variant], row.shape)
        digest = row.artifact.digest
        # These determine the graph at this shape; computing its identity for each row would be slow.
        key = digest, step.graph, repr(row.shape), repr(step.symbols)
        if key not in opened:
            code = code_of(read[digest], row, step.graph)
            guards = tuple(rename(text, step.symbols) for text in row.artifact.guards)
            opened[key] = Unopened(functools.partial(open_now, row.adaptor, code, step, bounds)), guards
        function, guards = opened[key]
        choice = Choice(shape=row.shape, bounds=bounds, guards=guards, function=function)
        pieces.setdefault((row.variant, row.piece_index), []).append(choice)
    return pieces


def _backend(choices: list[Choice]) -> PiecewiseBackend:
    return PiecewiseBackend(
        general=next((choice.function for choice in choices if not choice.bounds), None),
        choices=[choice for choice in choices if choice.bounds],
    )


def _is_from_data(guard: str, variant: Variant) -> bool:
    """Return whether a guard uses a size that is known only while the program runs."""
    return not set(symbols_of(guard)) <= {symbol.name for symbol in variant.symbols}


def _with_added_guards(plan: Plan, pieces: Mapping[tuple[int, int], list[Choice]]) -> Plan:
    """Return the plan with the guards that the compiler added for the general shape among its variants' relations."""
    if not any(choice.guards for choices in pieces.values() for choice in choices):
        return plan
    variants = []
    for index, variant in enumerate(plan.variants):
        added: dict[str, None] = dict.fromkeys(variant.relations)
        for step in variant.steps:
            for choice in pieces.get((index, step.piece), ()):
                added.update(
                    (guard, None) for guard in choice.guards if not choice.bounds or _is_from_data(guard, variant)
                )
        variants.append(replace(variant, relations=tuple(added)))
    return replace(plan, variants=tuple(variants))

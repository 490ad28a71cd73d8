"""`check`: run a warmed model as a server would, with traps laid, and say whether it may be served from CUDA graphs.

Prints nothing. Importable without torch: what runs the model is imported as the command runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cgtool.config import CompilationConfig
from cgtool.config_values import CompilationLevel
from cgtool.errors import ModelError, UsageError
from cgtool.events import Event, OnEvent, ignore
from cgtool.toolkit.model_choice import ModelChoice

if TYPE_CHECKING:
    from cgtool.model import ModelSpec
    from cgtool.serving.capture import CaptureReport
    from cgtool.serving.check import CheckRecord
    from cgtool.serving.runner import ModelRunner

SCHEMA = 1


@dataclass(frozen=True, kw_only=True)
class CheckReport:
    """What came of a check: what was run and is wrong, what was captured, and why the mode is not the one asked for."""

    record: CheckRecord
    captured: CaptureReport
    mode_reasons: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """Return the document that `check --json` prints."""
        record, captured = self.record, self.captured
        return {
            "schema": SCHEMA,
            "ok": record.may_be_served,
            "mode": record.mode.name,
            "mode_reasons": list(self.mode_reasons),
            "num_keys": record.num_keys,
            "num_replays": record.num_replays,
            "capture_secs": round(captured.secs, 3),
            "pool_bytes": captured.pool_bytes,
            "captured": [
                {
                    "mode": size.mode.name,
                    **size.descriptor._asdict(),
                    "secs": round(size.secs, 4),
                    "pool_bytes": size.pool_bytes,
                }
                for size in captured.sizes
            ],
            "findings": [
                {
                    "fault": one.fault,
                    "mode": one.mode and one.mode.name,
                    "num_tokens": one.num_tokens,
                    "sentence": one.sentence,
                }
                for one in record.findings
            ],
        }


def check(
    choice: ModelChoice,
    *,
    config: CompilationConfig,
    rank: int | None = None,
    num_rounds: int = 3,
    seed: int = 0,
    on_event: OnEvent = ignore,
) -> CheckReport:
    """Load a model from the cache, capture its CUDA graphs, and look for what would go wrong behind a server.

    Args:
        choice: The model, built with real weights; the factory's `ModelSpec` says how it is served.
        config: How it is served, and where the cache lies. At level 0 the module itself is checked, else the newest
            entry that fits it.
        rank: This process's place in a model-parallel group; None takes the environment's word.
        num_rounds: How often each graph is replayed.
        seed: Fixes batches and their order.
        on_event: Told of each phase as it goes.

    Raises:
        ModelError: MODEL could not be found or built, or does not say how it is served.
        CacheMissError: The cache does not serve it: warm it first.
        UsageError: No graph would be captured; the message says why.
        GraphError: A capture failed.
    """
    spec = choice.build(weights="real", on_event=on_event)
    # Imports torch: seconds that `--help` and wrong usage need not wait for.
    from cgtool.api import load
    from cgtool.serving.check import check_model

    if spec.serving is None:
        message = (
            f"{choice.model} does not say how it is served. Give its ModelSpec "
            "serving=cgtool.Serving(runner=...), a function that returns a ModelRunner over a KV cache."
        )
        raise ModelError(message, path=choice.model)
    embeddings = [_embedding(spec, name) for name in spec.serving.token_embeddings]
    compiles = config.effective_level != CompilationLevel.NO_COMPILATION
    model = spec.module
    if compiles:  # the newest entry that fits, however it was compiled
        model = load(
            spec.module,
            cache_dir=config.cache_dir or None,
            prefix=spec.prefix,
            rank=rank,
            trusted_keys=config.trusted_keys,
        )
    runner: ModelRunner = spec.serving.runner(model, config)
    if not list(runner.dispatcher.keys()):
        reasons = " ".join(runner.mode_reasons) or "The configuration asks for none."
        message = f"No CUDA graph would be captured, so there is nothing to check. {reasons}"
        raise UsageError(message, path="cudagraph_mode", actual=runner.dispatcher.mode.name)
    captured = runner.capture(on_event=on_event)
    on_event(Event(phase="start", message="replaying in random order"))
    record = check_model(
        runner,
        vocab_size=min(embedding.num_embeddings for embedding in embeddings),
        embeddings=embeddings,
        num_rounds=num_rounds,
        seed=seed,
    )
    return CheckReport(record=record, captured=captured, mode_reasons=tuple(runner.mode_reasons))


def _embedding(spec: ModelSpec, name: str) -> Any:
    modules = dict(spec.module.named_modules())
    found = modules.get(name)
    if not hasattr(found, "num_embeddings"):
        known = [path for path, module in modules.items() if hasattr(module, "num_embeddings")]
        message = (
            f"{name!r} is no embedding of the model; those it has: {', '.join(known) or 'none'}. Name those that turn "
            "token ids into rows in Serving(token_embeddings=...)."
        )
        raise ModelError(message, path=name, expected=known)
    return found

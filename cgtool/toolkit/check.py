"""`check`: run a warmed model as a server would, and report whether it can be served from CUDA graphs.

Prints nothing. Importable without torch, which is imported only when the model runs.
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
    """The result of a check."""

    #: What ran, and the faults it found.
    record: CheckRecord
    captured: CaptureReport
    #: Why the CUDA-graph mode is not the configured one.
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
                    "fault": finding.fault,
                    "mode": finding.mode and finding.mode.name,
                    "num_tokens": finding.num_tokens,
                    "sentence": finding.sentence,
                }
                for finding in record.findings
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
    """Load a model from the cache, capture its CUDA graphs, and test them for faults that would break serving.

    Args:
        choice: The model, built with real weights; its `ModelSpec` defines `serving`.
        config: The serving configuration and the cache directory. At level 0 the module itself is checked, otherwise
            the newest entry that fits it.
        rank: This process's rank in a model-parallel group; None takes it from the environment.
        num_rounds: How often each graph is replayed.
        seed: Determines the batches and their order.
        on_event: Called with progress events.

    Raises:
        ModelError: MODEL cannot be found or built, or its `ModelSpec` has no `serving`.
        CacheMissError: The cache has no entry for the model: warm it first.
        UsageError: No graph would be captured; the message gives the reason.
        GraphError: A capture failed.
    """
    spec = choice.build(weights="real", on_event=on_event)
    # Imported late: torch takes seconds to import, and --help and usage errors do not need it.
    from cgtool.api import load
    from cgtool.serving.check import check_model

    if spec.serving is None:
        message = (
            f"{choice.model} does not define how it is served. Give its ModelSpec "
            "serving=cgtool.Serving(runner=...), where runner is a function that returns a ModelRunner over a KV cache."
        )
        raise ModelError(message, path=choice.model)
    embeddings = [_embedding(spec, name) for name in spec.serving.token_embeddings]
    model = spec.module
    if config.effective_level != CompilationLevel.NO_COMPILATION:
        model = load(  # the newest entry that fits, whatever its configuration
            spec.module,
            cache_dir=config.cache_dir or None,
            prefix=spec.prefix,
            rank=rank,
            trusted_keys=config.trusted_keys,
        )
    runner: ModelRunner = spec.serving.runner(model, config)
    if not list(runner.dispatcher.keys()):
        reasons = " ".join(runner.mode_reasons) or "The configuration captures none."
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
    embedding = modules.get(name)
    if not hasattr(embedding, "num_embeddings"):
        known = [path for path, module in modules.items() if hasattr(module, "num_embeddings")]
        message = (
            f"{name!r} is not an embedding of the model; its embeddings: {', '.join(known) or 'none'}. Name the "
            "embeddings of token ids in Serving(token_embeddings=...)."
        )
        raise ModelError(message, path=name, expected=known)
    return embedding

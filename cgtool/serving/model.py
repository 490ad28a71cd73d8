"""A model that runs from CUDA graphs: a FULL wrapper around the model, and a PIECEWISE wrapper around each piece.

Serving relies on a small part of what `cgtool.load` returns: it is callable, has the live `module`, and allows its
pieces to be replaced (`wrap_pieces`). Any other object with this interface works as well.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import nn

from cgtool.config_values import CUDAGraphMode
from cgtool.errors import UsageError
from cgtool.plan.records import source_words
from cgtool.runtime.dispatch import Boxed
from cgtool.runtime.program import Piece, WrapPiece
from cgtool.serving.forward_context import BatchDescriptor, get_forward_context
from cgtool.serving.graphs import GraphBackend
from cgtool.serving.tensors import HeldTensors, ModelTensors, ReadTensors, copied
from cgtool.serving.wrapper import CUDAGraphWrapper, Pools


@runtime_checkable
class PiecewiseModel(Protocol):
    """A callable that runs compiled pieces, each of which can be wrapped."""

    module: nn.Module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the model."""

    def live_tensors(self) -> Mapping[str, torch.Tensor]:
        """Return the current tensors that calls read from the module, by source."""

    def open_all(self) -> None:
        """Open everything that calls would otherwise open on demand."""

    def wrap_pieces(self, wrap: WrapPiece) -> None:
        """Replace each compiled piece by what `wrap` returns for it, from now on."""


class GraphedModel:
    """A callable model that replays CUDA graphs as the forward context directs.

    Args:
        model: A `PiecewiseModel`; or any other callable, such as a module, for which only FULL graphs are captured.
        backend: The device.
        piecewise: Whether pieces are captured.
        lend_outputs: Return tensors that the next replay of the same graph overwrites; each graph then has a separate
            memory pool. Otherwise outputs are copied, and all graphs share one pool.
        copy_inputs: Copy inputs whose addresses may differ from those at capture: the arguments of the call, and the
            results of splitting ops.
        debug: Check shapes, strides and dtypes of inputs at each replay.

    Raises:
        UsageError: `piecewise` is set, and a piece cannot be captured. The message names the piece.
    """

    def __init__(
        self,
        model: Callable[..., Any],
        *,
        backend: GraphBackend,
        piecewise: bool = True,
        lend_outputs: bool = False,
        copy_inputs: bool = False,
        debug: bool = False,
    ) -> None:
        self.model = model
        self.pools = Pools(backend, shared=not lend_outputs)
        self.backend = backend
        self._lend = lend_outputs
        self._copy_inputs = copy_inputs
        self._debug = debug
        self._pieces: list[CUDAGraphWrapper] = []
        self.full = CUDAGraphWrapper(
            model,
            CUDAGraphMode.FULL,
            backend=backend,
            pools=self.pools,
            weights=_tensors_of(model),
            copied_inputs=None if copy_inputs else (),
            lend_outputs=lend_outputs,
            debug=debug,
        )
        if piecewise and isinstance(model, PiecewiseModel):
            model.wrap_pieces(self._wrap)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model.

        Raises:
            GraphError: As `CUDAGraphWrapper`.
            UsageError: Calls assign tensors to attributes of the model, which a replay would skip or overwrite.
        """
        mode = get_forward_context().cudagraph_runtime_mode
        if mode is not CUDAGraphMode.NONE and (kept := getattr(self.model, "assigned_places", ())):
            name = source_words(kept[0])
            msg = (
                f"Each call assigns a new tensor to {name} of the model, which a CUDA graph cannot do. Write into a "
                "buffer in place, return the tensor, or serve without graphs (cudagraph_mode NONE)."
            )
            raise UsageError(msg, path=name, actual=kept)
        output = self.full(*args, **kwargs)
        leaves_graphs = mode is CUDAGraphMode.PIECEWISE
        return copied(output) if leaves_graphs and not self._lend else output

    def open_all(self) -> None:
        """Open every artifact of the model, so that no call has to."""
        if isinstance(self.model, PiecewiseModel):
            self.model.open_all()

    @property
    def wrappers(self) -> tuple[CUDAGraphWrapper, ...]:
        """The wrapper of the model, and those of the pieces that calls have reached so far."""
        return (self.full, *self._pieces)

    def drop(self, mode: CUDAGraphMode, descriptor: BatchDescriptor) -> None:
        """Drop the graphs of one key."""
        for wrapper in self.wrappers:
            if wrapper.mode is mode:
                wrapper.drop(descriptor)

    def clear(self) -> None:
        """Drop all graphs and free their memory, as before a sleep. Later captures use new pools."""
        for wrapper in self.wrappers:
            wrapper.clear()

    def _wrap(self, piece: Piece, function: Boxed) -> Boxed:
        _check_piece(piece, copy_inputs=self._copy_inputs)
        wrapper = CUDAGraphWrapper(
            function,
            CUDAGraphMode.PIECEWISE,
            backend=self.backend,
            pools=self.pools,
            name=piece.name,
            copied_inputs=tuple(piece.returned_by_ops) if self._copy_inputs else (),
            lend_outputs=True,
            boxed=True,
            debug=self._debug,
        )
        self._pieces.append(wrapper)
        return wrapper


def _tensors_of(model: Callable[..., Any]) -> HeldTensors | None:
    """Return the tensors that a FULL graph of the model reads besides its arguments; None if they are unknown."""
    if isinstance(model, PiecewiseModel):
        return ReadTensors(model.live_tensors)
    module = model if isinstance(model, nn.Module) else getattr(model, "module", None)
    return None if module is None else ModelTensors(module)


def _check_piece(piece: Piece, *, copy_inputs: bool) -> None:
    """Raise if graphs that are chosen by token count cannot serve a piece."""
    if len(piece.dynamic_dims) > 1:
        msg = (
            f"{piece.name} has {len(piece.dynamic_dims)} dynamic dimensions ({', '.join(piece.dynamic_dims)}), but a "
            "CUDA graph is chosen by token count alone. Make the others static, or use a mode without PIECEWISE."
        )
        raise UsageError(msg, path=piece.name, actual=piece.dynamic_dims)
    if not piece.dynamic_dims and not piece.is_static:
        msg = (
            f"No input of {piece.name} has the token count in its shape. Add an input that does, or use a mode without "
            "PIECEWISE."
        )
        raise UsageError(msg, path=piece.name)
    if piece.returned_by_ops and not copy_inputs:
        position, op = min(piece.returned_by_ops.items())
        msg = (
            f"Tensor {position} of {piece.name} is returned by {op}, so its address differs at every call. Have the op "
            "write into an argument (mutates_args), or set cudagraph_copy_inputs."
        )
        raise UsageError(msg, path=piece.name, actual=op)

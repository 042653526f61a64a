"""An optimizer that updates pieces of parameters: float32 copies of short ones, and a replica's own part of each.

It stands around one of torch's optimizers that treat every element alike (SGD, Adam, AdamW, …), and in its place:

    optimizer = Piecewise(parameters, torch.optim.AdamW, {"lr": 1e-3}, master_weights=True, peers=group)

A piece is a run of elements of a parameter as they lie in memory. Copies are updated a few at a time, so that few
gradients are there in float32. Where ``peers`` share out the state each has an equal run of every parameter, updates
it, and hands it to the others after the step. The state has the form of a plain optimizer's, each tensor as large as
its parameter, with the copy as ``master``; to put it together all peers must call ``state_dict``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn

from autopipe.core.errors import UsageError
from autopipe.core.optimizer import MASTER_BYTES, Optimizer

_AT_ONCE_BYTES = 4 << 20
"""Of float32 gradients, and of what is handed round: as much as replicas sum at once."""

MASTER = "master"
"""The name of a float32 copy in the state."""

Make = Callable[..., torch.optim.Optimizer]


class Piece(NamedTuple):
    """Elements ``start`` to ``stop`` of a parameter; ``tensor`` is what is updated, itself the parameter if all are."""

    parameter: nn.Parameter
    start: int
    stop: int
    tensor: torch.Tensor

    @property
    def copied(self) -> bool:
        """Whether it is a float32 copy."""
        return self.tensor.dtype is not self.parameter.dtype

    def of(self, whole: torch.Tensor) -> torch.Tensor:
        """These elements of a tensor of the parameter's shape."""
        return _flat(_laid_out(whole, self.parameter))[self.start : self.stop]

    def take_gradient(self) -> None:
        """The parameter's gradient becomes the piece's."""
        if self.tensor is not self.parameter:
            gradient = self.parameter.grad
            self.tensor.grad = None if gradient is None else self.of(gradient).to(self.tensor.dtype)

    def give(self) -> None:
        """What was updated becomes the parameter's."""
        if self.copied:
            self.of(self.parameter.detach()).copy_(self.tensor)
        if self.tensor is not self.parameter:
            self.tensor.grad = None

    def follow(self) -> None:
        """Something else has changed the parameter: the copy becomes its value where it does not round to it."""
        if self.copied:
            now = self.of(self.parameter.detach())
            self.tensor.copy_(torch.where(self.tensor.to(now.dtype) == now, self.tensor, now.to(self.tensor.dtype)))


class _Part(NamedTuple):
    """Pieces of parameters of one group that are updated together, and their optimizer."""

    group: int
    pieces: list[Piece]
    inner: torch.optim.Optimizer

    def step(self, settings: Mapping[str, Any]) -> None:
        """Update the pieces by a group's settings."""
        self.inner.param_groups[0].update({name: value for name, value in settings.items() if name != "params"})
        for piece in self.pieces:
            piece.take_gradient()
        self.inner.step()
        for piece in self.pieces:
            piece.give()


class _Run(NamedTuple):
    """Elements ``start`` to ``stop`` of each peer's share of a parameter."""

    parameter: nn.Parameter
    share: int
    start: int
    stop: int

    def of(self, peer: int) -> torch.Tensor:
        """Those of one peer; at a parameter's end fewer, or none."""
        begin = peer * self.share
        return _flat(self.parameter.detach())[begin + self.start : begin + self.stop]


class Piecewise(torch.optim.Optimizer):
    """``make(groups, **options)`` over pieces of ``parameters``: tensors, or groups of them as torch's optimizers take.

    With ``master_weights`` parameters shorter than float32 have copies, which follow where something else changes the
    parameter. ``peers`` are the processes that share out the state, None for no others. Raises UsageError for a
    parameter whose elements do not lie side by side.
    """

    def __init__(
        self,
        parameters: Iterable[Any],
        make: Make,
        options: Mapping[str, Any],
        *,
        master_weights: bool = False,
        peers: dist.ProcessGroup | None = None,
    ) -> None:
        plain = make(parameters, **options)
        super().__init__(plain.param_groups, plain.defaults)
        self._peers = peers
        self._count, self._index = (dist.get_world_size(peers), dist.get_rank(peers)) if peers else (1, 0)
        self._held: list[nn.Parameter] = [p for group in self.param_groups for p in group["params"]]
        for parameter in self._held:
            _check_dense(parameter)
        self._parts = [
            _Part(number, pieces, make([{"params": [piece.tensor for piece in pieces]}], **options))
            for number, group in enumerate(self.param_groups)
            for pieces in _together(piece for p in group["params"] for piece in self._cut(p, master_weights))
        ]
        self._rounds = [*_batches(run for p in self._held for run in self._runs(p))] if peers else []
        self._versions = self._now()

    def _share(self, parameter: nn.Parameter) -> int:
        return -(-parameter.numel() // self._count)

    def _cut(self, parameter: nn.Parameter, master_weights: bool) -> Iterator[Piece]:
        """This process's pieces of a parameter."""
        size, share = parameter.numel(), self._share(parameter)
        start, stop = min(self._index * share, size), min((self._index + 1) * share, size)
        if master_weights and parameter.is_floating_point() and parameter.itemsize < MASTER_BYTES:
            most = _AT_ONCE_BYTES // MASTER_BYTES
            for begin in range(start, stop, most) if size else (0,):
                end = min(begin + most, stop)
                yield Piece(parameter, begin, end, _flat(parameter.detach())[begin:end].float())
        elif self._count == 1:
            yield Piece(parameter, 0, size, parameter)
        elif start < stop or not size:
            yield Piece(parameter, start, stop, _flat(parameter.detach())[start:stop])

    def _runs(self, parameter: nn.Parameter) -> Iterator[_Run]:
        """All elements of a parameter, as many at once as are handed round."""
        share = self._share(parameter)
        most = max(1, _AT_ONCE_BYTES // (self._count * parameter.itemsize))
        for start in range(0, share, most):
            yield _Run(parameter, share, start, min(start + most, share))

    def _now(self) -> list[int]:
        return [parameter._version for parameter in self._held]

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters; with peers all of them must call it."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self._follow()
        for part in self._parts:
            part.step(self.param_groups[part.group])
        for runs in self._rounds:
            self._hand_round(runs)
        self._versions = self._now()
        return loss

    def _follow(self) -> None:
        changed = {p for p, seen, now in zip(self._held, self._versions, self._now(), strict=True) if seen != now}
        for piece in self._pieces():
            if piece.parameter in changed:
                piece.follow()

    def _pieces(self) -> Iterator[Piece]:
        return (piece for part in self._parts for piece in part.pieces)

    def _hand_round(self, runs: Sequence[_Run]) -> None:
        """Every peer's part of some parameters to all peers; as bytes, which every backend sends."""
        places = [0]
        for run in runs:
            places.append(places[-1] + run.stop - run.start)
        own = runs[0].parameter.detach().new_zeros(places[-1])
        for place, run in zip(places, runs, strict=False):
            mine = run.of(self._index)
            own[place : place + len(mine)] = mine
        found = own.new_empty(self._count, len(own))
        bytes_ = [each.view(torch.uint8) for each in found]
        dist.all_gather(bytes_, own.view(torch.uint8), group=self._peers)
        for peer in set(range(self._count)) - {self._index}:
            for place, run in zip(places, runs, strict=False):
                theirs = run.of(peer)
                theirs.copy_(found[peer, place : place + len(theirs)])

    def tensors(self) -> list[torch.Tensor]:
        """The tensors that this process keeps besides the parameters."""
        copies = [piece.tensor for piece in self._pieces() if piece.copied]
        return copies + [tensor for part in self._parts for tensor in _state_tensors(part.inner)]

    def state_dict(self) -> dict[str, Any]:
        """The state of whole parameters, those of all peers put together; all peers must call it."""
        own: dict[int, list[dict[str, Any]]] = {}
        numbers = {parameter: number for number, parameter in enumerate(self._held)}
        for part in self._parts:
            for piece in part.pieces:
                kept = part.inner.state.get(piece.tensor)
                if kept:
                    named = {**kept, MASTER: piece.tensor} if piece.copied else kept
                    own.setdefault(numbers[piece.parameter], []).append(
                        {n: _plain(v, piece.tensor) for n, v in named.items()}
                    )
        parts: list[Any] = [own] * self._count
        if self._peers:
            dist.all_gather_object(parts, own, group=self._peers)
        return {"state": self._whole(parts), "param_groups": super().state_dict()["param_groups"]}

    def _whole(self, parts: Sequence[dict[int, list[dict[str, Any]]]]) -> dict[int, dict[str, Any]]:
        """The states of the pieces of all peers as one, shaped as the parameters."""
        state: dict[int, dict[str, Any]] = {}
        for number in sorted({number for part in parts for number in part}):
            pieces = [piece for part in parts for piece in part.get(number, ())]
            state[number] = {n: _joined([piece[n] for piece in pieces], self._held[number]) for n in pieces[0]}
        return state

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take this process's part of a state of whole parameters; a copy that it lacks is the parameter's value."""
        super().load_state_dict({"state": {}, "param_groups": state_dict["param_groups"]})
        numbers = {parameter: number for number, parameter in enumerate(self._held)}
        self._follow()
        for part in self._parts:
            part.inner.state.clear()
            for piece in part.pieces:
                given = dict(state_dict["state"].get(numbers[piece.parameter], {}))
                if (master := given.pop(MASTER, None)) is not None and piece.copied:
                    piece.tensor.copy_(piece.of(master))
                if given:
                    part.inner.state[piece.tensor] = {name: _taken(name, value, piece) for name, value in given.items()}
        self._versions = self._now()


def planned_optimizer(
    update: Optimizer,
    parameters: Iterable[Any],
    make: Make,
    options: Mapping[str, Any],
    peers: dist.ProcessGroup | None,
) -> torch.optim.Optimizer:
    """``make(parameters, **options)``, its state kept as a plan says; ``peers`` are the same rank of all replicas."""
    if update.plain:
        return make(parameters, **options)
    shared = peers if update.shards > 1 else None
    return Piecewise(parameters, make, options, master_weights=update.master_weights, peers=shared)


def kept_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    """The tensors that an optimizer keeps on this process besides the parameters."""
    return optimizer.tensors() if isinstance(optimizer, Piecewise) else _state_tensors(optimizer)


def _state_tensors(optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    return [value for held in optimizer.state.values() for value in held.values() if isinstance(value, torch.Tensor)]


def _check_dense(parameter: torch.Tensor) -> None:
    if torch.empty_like(parameter).stride() != parameter.stride() and parameter.numel():
        raise UsageError(
            f"a parameter of shape {tuple(parameter.shape)} has gaps between its elements: master weights and a shared "
            f"optimizer need it in one run of memory"
        )


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    """The elements as they lie in memory."""
    return tensor.as_strided((tensor.numel(),), (1,))


def _laid_out(tensor: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The tensor, its elements in the order in memory of another one of its shape."""
    if tensor.stride() == like.stride():
        return tensor
    return torch.empty_like(like, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def _together(pieces: Iterable[Piece]) -> Iterator[list[Piece]]:
    """Copies as many as fit, and all other pieces, which have their gradients already."""
    others: list[Piece] = []
    bucket: list[Piece] = []
    for piece in pieces:
        if not piece.copied:
            others.append(piece)
            continue
        if sum(each.tensor.nbytes for each in bucket) + piece.tensor.nbytes > _AT_ONCE_BYTES and bucket:
            yield bucket
            bucket = []
        bucket.append(piece)
    yield from (each for each in (bucket, others) if each)


def _batches(runs: Iterable[_Run]) -> Iterator[list[_Run]]:
    """Runs of one format, as many as are handed round at once."""
    batch: list[_Run] = []
    size = 0
    for run in sorted(runs, key=lambda run: str(run.parameter.dtype)):
        more = run.parameter.itemsize * (run.stop - run.start)
        if batch and (size + more > _AT_ONCE_BYTES or run.parameter.dtype is not batch[0].parameter.dtype):
            yield batch
            batch, size = [], 0
        batch.append(run)
        size += more
    if batch:
        yield batch


def _plain(value: Any, tensor: torch.Tensor) -> Any:
    """A state of a piece's tensor on the CPU, what it has of each element as that lies in memory."""
    if not isinstance(value, torch.Tensor):
        return value
    return (_flat(_laid_out(value, tensor)) if value.dim() else value).cpu()


def _joined(values: Sequence[Any], parameter: nn.Parameter) -> Any:
    """What the pieces of a parameter have in its shape; what is not of single elements is alike in all of them."""
    first = values[0]
    if not isinstance(first, torch.Tensor) or not first.dim():
        return first
    whole = torch.empty_like(parameter, dtype=first.dtype, device=first.device)
    _flat(whole).copy_(torch.cat([*values]))
    return whole


def _taken(name: str, value: Any, piece: Piece) -> Any:
    """A piece's part of a parameter's state, as torch's optimizers keep it."""
    if not isinstance(value, torch.Tensor):
        return value
    if name == "step" or value.shape != piece.parameter.shape:
        return value.clone()
    there = value.to(piece.tensor.device, piece.tensor.dtype)
    return (_laid_out(there, piece.parameter) if piece.tensor is piece.parameter else piece.of(there)).clone()

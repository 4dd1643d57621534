"""Several trainer ranks that are used as if they were one actor.

`start_trainer` (actor.py) makes a group, the loop's TrainerHandle and tests call it. Every call goes to every rank;
rank 0 answers for all. A group that failed in any way but all ranks alike is of no more use: its owner kills it.
Imports no torch and knows nothing of what the ranks do.
"""

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

import ray
from ray.util import remove_placement_group

from lorafleet_runtime.errors import ConfigError, Retryable, RunError
from lorafleet_runtime.remote import call

GRACE_SECONDS = 120.0
"""After one rank raised, the others have this long to raise the same, or Ray to say which rank died."""

_FIRST_ONLY = frozenset({"saved", "snapshotted", "prepare", "retain", "pid"})
"""Calls that concern rank 0 alone: they are about files, and meet nobody in a collective."""


class RanksDisagree(Retryable):
    """One rank raised and another did not, or something else: they are no longer in the same state."""


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's place in its group."""

    rank: int = 0
    """0 to world - 1; data-parallel rank * tensor-parallel size + tensor-parallel rank."""
    neighbours: int = 1
    """Ranks on this one's node, itself included: they share its cores."""
    store: tuple[str, int] | None = None
    """Address and port of rank 0's rendezvous store; None for a single rank."""


class TrainerGroup:
    """Looks like the Ray handle of one actor: `await group.method.remote(...)` gives rank 0's answer.

    With one rank that is the actor's own reference. With several, any error ends the wait, for the other ranks may
    wait for the failed one:
    - RunError: as all ranks raised it.
    - Retryable: a rank died; or RanksDisagree.
    - ConfigError: as any rank raised it.
    - any other error that all ranks raised, as rank 0 did.

    Args:
        actors: one handle per rank.
        placement: the placement group that they sit in, removed with them.
        share: makes of an argument what is cheap to send to several ranks.
    """

    def __init__(self, actors: Sequence[Any], placement: Any = None, share: Callable[[Any], Any] = ray.put) -> None:
        self.actors = list(actors)
        """By rank, once `start` has answered."""
        self.share = share
        self._placement = placement

    def __getattr__(self, name: str) -> Any:
        return getattr(self.actors[0], name) if len(self.actors) == 1 else _Method(self, name)

    def kill(self) -> None:
        """End every rank, whatever it does."""
        with contextlib.ExitStack() as ends:  # one that cannot be ended keeps none of the others
            if self._placement is not None:
                ends.callback(remove_placement_group, self._placement)
            for actor in self.actors:
                ends.callback(ray.kill, actor)

    async def seat(self) -> Any:
        """Give every rank its seat and start it. Ranks of one node get neighbouring numbers."""
        nodes = await asyncio.gather(*(call(actor.node.remote()) for actor in self.actors))
        by_node = sorted(range(len(nodes)), key=lambda i: (nodes.index(nodes[i]), i))
        self.actors = [self.actors[i] for i in by_node]
        neighbours = [nodes.count(nodes[i]) for i in by_node]
        store = await call(self.actors[0].open_store.remote(neighbours[0]))
        seats = [Seat(rank, count, store) for rank, count in enumerate(neighbours)]
        return await agree([a.start.remote(seat) for a, seat in zip(self.actors, seats, strict=True)])


class _Method:
    """`group.method`, as Ray's ActorMethod."""

    def __init__(self, group: TrainerGroup, name: str, **options: Any) -> None:
        self._group = group
        self._name = name
        self._options = options

    def options(self, **options: Any) -> "_Method":
        return _Method(self._group, self._name, **options)

    def remote(self, *arguments: object) -> Any:
        """Send the call to every rank, now. With num_returns=2 the second value is rank 0's reference to it."""
        if self._name == "start":
            return self._group.seat()
        first, *others = self._group.actors
        method = getattr(first, self._name)
        if self._options:
            method = method.options(**self._options)
        if self._name in _FIRST_ONLY:
            return method.remote(*arguments)
        shared = [self._group.share(a) if isinstance(a, list) else a for a in arguments]  # a batch: serialized once
        answer = method.remote(*shared)
        head, *more = answer if isinstance(answer, (list, tuple)) else [answer]
        combined = agree([head, *(getattr(actor, self._name).remote(*shared) for actor in others)])
        return (combined, *more) if more else combined


async def agree(references: Sequence[Awaitable[Any]]) -> Any:
    """The first answer, once all have come; see TrainerGroup for what is raised.

    Args:
        references: of the same call, by rank.
    """
    answers = [asyncio.ensure_future(call(reference)) for reference in references]
    try:
        done, waiting = await asyncio.wait(answers, return_when=asyncio.FIRST_EXCEPTION)
        until = asyncio.get_running_loop().time() + GRACE_SECONDS
        while waiting or any(answer.exception() for answer in done):
            left = until - asyncio.get_running_loop().time()
            if not waiting or left <= 0 or any(isinstance(answer.exception(), Retryable) for answer in done):
                raise _verdict(answers)
            more, waiting = await asyncio.wait(waiting, timeout=left, return_when=asyncio.FIRST_EXCEPTION)
            done |= more
        return answers[0].result()
    finally:
        for answer in answers:
            answer.cancel()  # of the waiting only; Ray goes on with the call


def _verdict(answers: Sequence[asyncio.Future[Any]]) -> BaseException:
    """What the ranks' errors come to."""
    errors = {rank: error for rank, a in enumerate(answers) if a.done() and (error := a.exception()) is not None}
    for kind in (Retryable, ConfigError):  # a rank that died is why the others raised
        for rank, error in errors.items():
            if isinstance(error, kind):
                return _because(error, kind(f"trainer rank {rank} of {len(answers)}: {error}"))
    if len(errors) == len(answers) and len({_kind(error) for error in errors.values()}) == 1:
        return errors[0]
    said = [
        f"rank {rank} {_text(errors[rank]) if rank in errors else 'answered' if a.done() else 'has not answered'}"
        for rank, a in enumerate(answers)
    ]
    text = f"the trainer's ranks disagree: {'; '.join(said)}"
    return _because(next(iter(errors.values())), RanksDisagree(text))


def _because(cause: BaseException, error: BaseException) -> BaseException:
    error.__cause__ = cause
    return error


def _inner(error: BaseException) -> BaseException:
    """Ray makes a class of its own for every error that it wraps."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, BaseException) else error


def _kind(error: BaseException) -> tuple[type[BaseException], str]:
    error = _inner(error)
    return type(error), error.reason if isinstance(error, RunError) else ""


def _text(error: BaseException) -> str:
    error = _inner(error)
    return f"raised {type(error).__name__}: {error}"

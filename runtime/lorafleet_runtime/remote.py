"""Takes the runtime's own errors out of Ray's wrappers.

Called wherever a Ray actor is called: `RunError` must reach the loop as itself, and an actor that died is `Retryable`.
"""

from collections.abc import Awaitable

from ray.exceptions import (
    GetTimeoutError,
    LocalRayletDiedError,
    NodeDiedError,
    ObjectLostError,
    OutOfMemoryError,
    RayActorError,
    RayError,
    RayTaskError,
    RpcError,
    WorkerCrashedError,
)

from lorafleet_runtime.errors import Retryable, RuntimeFault

_AWAY = (
    RayActorError, WorkerCrashedError, NodeDiedError, LocalRayletDiedError, ObjectLostError, OutOfMemoryError,
    RpcError, GetTimeoutError,
)  # fmt: skip
"""The other side died, is restarting, or cannot be reached."""


async def call[T](reference: Awaitable[T]) -> T:
    """Await an actor call; for example `await call(engine.list.remote())`.

    Raises:
        RuntimeFault: as the actor raised it; Retryable when the actor is away.
        RayError: the actor raised an error of another kind.
    """
    try:
        return await reference
    except RayError as error:
        raise unwrap(error) from error


def unwrap(error: BaseException) -> BaseException:
    """The runtime's own error inside a Ray error.

    Returns:
        The RuntimeFault that the actor raised, a Retryable when the actor is away, else `error` itself.
    """
    inner: BaseException = error
    # An actor that calls another one may raise a wrapper around a wrapper.
    while isinstance(inner, RayTaskError) and isinstance(inner.cause, BaseException):
        inner = inner.cause
    if isinstance(inner, RuntimeFault):
        return inner
    if isinstance(inner, _AWAY):
        text = str(inner).strip() or "no detail"
        return Retryable(f"{type(inner).__name__}: {text.splitlines()[0]}")
    return error

"""The runtime's errors through Ray's wrappers, built as Ray builds them."""

import asyncio
from typing import Any

import pytest
from ray.exceptions import ActorDiedError, ActorUnavailableError, RayTaskError

from lorafleet_api.v1alpha1.reasons import DATA_ERROR
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.remote import call, unwrap


def wrapped(cause: Exception) -> Any:
    return RayTaskError("f", "traceback", cause, proctitle="p", pid=1, ip="127.0.0.1").as_instanceof_cause()


def test_a_run_error_comes_out_as_itself() -> None:
    inner = RunError(DATA_ERROR, "data: 'x' does not exist")
    for error in (wrapped(inner), wrapped(wrapped(inner))):
        assert type(error) is not RunError and unwrap(error) is inner


def test_a_dead_actor_is_retryable() -> None:
    for error in (ActorDiedError(), ActorUnavailableError("gone", None), wrapped(ActorDiedError())):
        assert type(unwrap(error)) is Retryable


def test_other_errors_stay_what_they_are() -> None:
    error = wrapped(KeyError("k"))
    assert unwrap(error) is error


async def test_call_returns_the_value_or_raises_the_unwrapped_error() -> None:
    future: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    future.set_result(3)
    assert await call(future) == 3
    failed: asyncio.Future[int] = asyncio.get_running_loop().create_future()
    failed.set_exception(wrapped(RunError(DATA_ERROR, "m")))
    with pytest.raises(RunError) as caught:
        await call(failed)
    assert type(caught.value) is RunError

"""The reward child process against functions that print, hang, exit, raise and return nonsense."""

import asyncio
import contextlib
import math
import os
import signal
import sys
import textwrap
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import pytest_asyncio

from lorafleet_runtime.rewards.process import RewardFailure, RewardProcess

MEMORY = 512 << 20
MODULE = """
    import asyncio, os, subprocess, sys, time

    def echo(*, prompt, response, label, metadata, truncated):
        assert prompt == "p" and metadata == {"k": [1]} and truncated is True
        return len(response) + label

    def loud(**call):
        print('{"value": 99}', flush=True)
        os.write(1, b'{"value": 98}\\n')
        subprocess.run(["echo", '{"value": 97}'])
        return float(len(sys.stdin.read()))

    def by_response(*, response, **call):
        if response == "hang":
            time.sleep(3600)
        if response == "exit":
            sys.exit("bye")
        if response == "die":
            os._exit(7)
        if response == "die once":
            if os.path.exists(call["metadata"]["seen"]):
                return 1.0
            open(call["metadata"]["seen"], "w").close()
            os._exit(7)
        if response == "raise":
            raise KeyError("no such key")
        if response == "pid":
            return os.getpid()
        if response in ("helper", "nameless helper"):
            environment = {} if response == "nameless helper" else None
            helper = subprocess.Popen(["/bin/sleep", "60"], start_new_session=True, env=environment)
            with open(call["metadata"]["helper"], "a") as file:
                file.write(f"{helper.pid}\\n")
            if call["metadata"].get("die"):
                print("last words", flush=True)
                os._exit(7)
            if call["metadata"].get("hang"):
                time.sleep(3600)
            return 0.5
        if response == "kill":
            os.kill(os.getpid(), 9)
        if response == "eat":
            return len(bytearray(1 << 30))
        if response == "print":
            while True:
                print("x" * 1000)
        if response == "chatty":
            print("x" * 100_000)
            return 0.5
        if response == "surrogate":
            raise ValueError("half a character: \\ud800")
        if response == "huge text":
            raise ValueError("x" * 1_000_000)
        if response == "coroutine":
            return asyncio.sleep(0)
        if response == "bool":
            return True
        return {
            "none": None, "text": "1.0", "nan": float("nan"), "inf": float("-inf"), "list": [1], "pair": [0.5, 0.5],
            "empty": [], "dict": {"score": 1.0}, "big": 10**400,
        }[response]

    def no_torch(**call):
        return float("torch" in sys.modules or "ray" in sys.modules)

    def positional(prompt, response):
        return 0.0

    constant = 3
"""


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_rewards.py").write_text(textwrap.dedent(MODULE))
    (tmp_path / "broken_rewards.py").write_text("raise RuntimeError('at import')\n")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    return "user_rewards"


@pytest_asyncio.fixture
async def reward(module: str) -> AsyncIterator[RewardProcess]:
    process = RewardProcess(f"{module}.by_response", 10.0, MEMORY)
    yield process
    await process.close()


async def score(process: RewardProcess, response: str, **fields: Any) -> float:
    call: dict[str, Any] = {"prompt": "p", "label": None, "metadata": {}, "truncated": False} | fields
    return await process.score(response=response, **call)


async def failure(process: RewardProcess, response: str) -> str:
    with pytest.raises(RewardFailure) as caught:
        await score(process, response)
    return str(caught.value)


async def one_call(target: str, response: str, **fields: Any) -> float:
    process = RewardProcess(target, 10.0, MEMORY)
    try:
        return await score(process, response, **fields)
    finally:
        await process.close()


async def test_the_function_gets_every_keyword(module: str) -> None:
    assert await one_call(f"{module}.echo", "four", label=3, metadata={"k": [1]}, truncated=True) == 7.0


async def test_prints_do_not_reach_the_protocol_and_stdin_is_empty(module: str) -> None:
    assert await one_call(f"{module}.loud", "x") == 0.0


async def test_the_child_imports_neither_torch_nor_ray(module: str) -> None:
    assert await one_call(f"{module}.no_torch", "x") == 0.0


async def test_an_exception_is_told_with_type_and_text(reward: RewardProcess) -> None:
    assert await failure(reward, "raise") == "KeyError: 'no such key'"
    assert await score(reward, "bool") == 1.0  # the child serves on


@pytest.mark.parametrize(
    "response", ["none", "text", "nan", "inf", "list", "pair", "empty", "dict", "big", "coroutine"]
)
async def test_what_is_no_finite_number_is_a_failure(reward: RewardProcess, response: str) -> None:
    assert "return a finite number" in await failure(reward, response)


async def test_sys_exit_is_an_answer_like_any_exception(reward: RewardProcess) -> None:
    assert await failure(reward, "exit") == "SystemExit: bye"


async def test_a_child_that_dies_is_replaced(reward: RewardProcess) -> None:
    first = await score(reward, "pid")
    assert "exited with code 7" in await failure(reward, "die")
    second = await score(reward, "pid")
    assert first != second and not math.isnan(second)


async def test_a_child_that_is_killed_is_replaced_too(reward: RewardProcess) -> None:
    assert "exited with code -9" in await failure(reward, "kill")
    assert await score(reward, "bool") == 1.0


async def test_a_function_that_eats_memory_is_stopped_at_the_pools_limit(reward: RewardProcess) -> None:
    assert await failure(reward, "eat") == "MemoryError: more than the 512 MiB of the pool's rollout.rewardMemoryBytes"
    assert await score(reward, "bool") == 1.0


async def test_a_function_that_prints_without_end_is_stopped_and_little_of_it_is_logged(
    reward: RewardProcess, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "lorafleet_runtime.rewards.process"):
        assert await failure(reward, "print") == "printed more than 4 MiB in one call; print less"
        assert 0 < len(caplog.text) < 10_000
    assert await score(reward, "bool") == 1.0


async def test_a_chatty_function_is_no_failure_however_often_it_is_called(reward: RewardProcess) -> None:
    assert [await score(reward, "chatty") for _ in range(60)] == [0.5] * 60  # 6 MB in all


@pytest.mark.parametrize("response", ["surrogate", "huge text"])
async def test_the_text_of_an_exception_can_always_be_told(reward: RewardProcess, response: str) -> None:
    text = await failure(reward, response)
    assert text.startswith("ValueError: ") and len(text.encode()) < 3000


async def test_a_hang_is_killed_and_the_next_call_served(module: str) -> None:
    process = RewardProcess(f"{module}.by_response", 0.3, MEMORY)
    try:
        await process.start()
        hung = process.pid
        assert hung is not None
        assert await failure(process, "hang") == "no answer within 0.3 s"
        with pytest.raises(ProcessLookupError):
            os.kill(hung, 0)
        process._timeout = 10.0  # for a child that has just started
        assert await score(process, "bool") == 1.0
    finally:
        await process.close()


@pytest.fixture
def helper(tmp_path: Path) -> Iterator[Path]:
    path = tmp_path / "helper"
    yield path
    for pid in path.read_text().split() if path.exists() else ():
        with contextlib.suppress(ProcessLookupError):
            os.kill(int(pid), signal.SIGKILL)


def lives(path: Path) -> bool:
    try:
        return bool(psutil.Process(int(path.read_text())).status() != psutil.STATUS_ZOMBIE)
    except psutil.NoSuchProcess:
        return False


@pytest.mark.parametrize("kind", ["helper", "nameless helper"])
async def test_a_helper_in_a_session_of_its_own_does_not_hold_up_the_end(
    reward: RewardProcess, helper: Path, kind: str
) -> None:
    assert await score(reward, kind, metadata={"helper": str(helper)}) == 0.5
    assert lives(helper)
    async with asyncio.timeout(30):
        await reward.close()
        while kind == "helper" and lives(helper):  # it was killed, but is no child of anybody who waits for it
            await asyncio.sleep(0.01)
    assert lives(helper) == (kind == "nameless helper")


async def test_a_helper_that_outlives_its_child_does_not_hold_up_the_next_call(
    reward: RewardProcess, helper: Path, caplog: pytest.LogCaptureFixture
) -> None:
    await reward.start()
    with caplog.at_level("INFO", "lorafleet_runtime.rewards.process"):
        async with asyncio.timeout(30):
            with pytest.raises(RewardFailure, match="exited with code 7"):
                await score(reward, "nameless helper", metadata={"helper": str(helper), "die": True})
            assert await score(reward, "bool") == 1.0
    assert "last words" in caplog.text


async def test_a_helper_does_not_hold_up_a_timeout(module: str, helper: Path) -> None:
    process = RewardProcess(f"{module}.by_response", 0.5, MEMORY)
    try:
        await process.start()
        async with asyncio.timeout(30):
            with pytest.raises(RewardFailure, match=r"no answer within 0\.5 s"):
                await score(process, "nameless helper", metadata={"helper": str(helper), "hang": True})
            process._timeout = 10.0  # for a child that has just started
            assert await score(process, "bool") == 1.0
    finally:
        await process.close()


async def test_a_cancelled_call_leaves_no_answer_behind(reward: RewardProcess) -> None:
    await reward.start()
    task = asyncio.create_task(score(reward, "hang"))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert await score(reward, "bool") == 1.0


async def test_a_child_that_dies_under_a_call_is_called_once_more(reward: RewardProcess, tmp_path: Path) -> None:
    seen = {"seen": str(tmp_path / "seen")}
    assert await reward.score(prompt="p", response="die once", label=0, metadata=seen, truncated=False) == 1.0
    assert (tmp_path / "seen").exists()


async def test_close_ends_a_running_call(reward: RewardProcess) -> None:
    await reward.start()
    task = asyncio.create_task(failure(reward, "hang"))
    await asyncio.sleep(0)
    await reward.close()
    assert "exited" in await task
    assert reward.pid is None


async def test_close_is_for_good(reward: RewardProcess) -> None:
    await reward.start()
    asking = [asyncio.create_task(failure(reward, "hang")), asyncio.create_task(failure(reward, "bool"))]
    await asyncio.sleep(0)  # the second waits for the first
    await reward.close()
    assert [await task for task in asking][1] == "the reward process is closed"
    assert await failure(reward, "bool") == "the reward process is closed"
    assert reward.pid is None


async def test_a_child_whose_parent_is_gone_ends_also_while_it_hangs(module: str) -> None:
    child = await asyncio.create_subprocess_exec(
        sys.executable, "-P", "-m", "lorafleet_runtime.rewards.child",
        stdin=asyncio.subprocess.PIPE, stdout=asyncio.subprocess.PIPE,
    )  # fmt: skip
    assert child.stdin is not None and child.stdout is not None
    try:
        child.stdin.write(b'{"target": "user_rewards.by_response", "memoryBytes": 1073741824}\n')
        assert await child.stdout.readline() == b'{"ok": true}\n'
        child.stdin.write(b'{"prompt":"","response":"hang","label":0,"metadata":{},"truncated":false}\n')
        child.stdin.close()
        assert await asyncio.wait_for(child.wait(), 30) == 0
    finally:
        if child.returncode is None:
            child.kill()
            await child.wait()


@pytest.mark.parametrize(
    ("target", "text"),
    [
        ("user_rewards.missing", "AttributeError"),
        ("no_such_module.f", "ModuleNotFoundError: No module named 'no_such_module'"),
        ("broken_rewards.f", "RuntimeError: at import"),
        ("user_rewards.constant", "is a int, not a function"),
        ("user_rewards.positional", "cannot be called with keywords prompt, response, label, metadata, truncated"),
    ],
)
async def test_what_cannot_be_loaded_says_why(module: str, target: str, text: str) -> None:
    process = RewardProcess(target, 10.0, MEMORY)
    with pytest.raises(RewardFailure, match=text.replace("(", r"\(")):
        await process.start()
    assert process.pid is None

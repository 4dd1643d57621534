"""The engine's bookkeeping, on a backend that holds adapters and answers requests when told to."""

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from lorafleet_runtime.engines.backend import Adapter, EngineDead
from lorafleet_runtime.engines.engine import Engine, own_directory
from lorafleet_runtime.engines.settings import EngineConfig
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.publish.base_model import BaseModel
from lorafleet_runtime.types import Completion, SamplingParams, VersionId
from support.adapters import RandomAdapter, random_adapter

SHAPES = {"model.layers.0.self_attn.q_proj": (8, 6)}
GOOD = random_adapter(SHAPES, rank=4, seed=0)
PARAMS = SamplingParams(n=1, temperature=1.0, top_p=1.0, max_tokens=4)
ANSWER = [Completion((1, 2), (-0.1, -0.2), "length")]


class HoldingBackend:
    """Holds adapters by id; a request waits until `open` is set."""

    def __init__(self) -> None:
        self.held: dict[int, Adapter] = {}
        self.seen: list[Adapter | None] = []
        self.open = asyncio.Event()
        self.open.set()
        self.started = asyncio.Event()
        self.dead = False
        self.fault: Exception | None = None
        self.forgets = False
        self.sticky = False

    async def load(self, adapter: Adapter) -> None:
        self._alive()
        assert (Path(adapter.path) / "adapter_model.safetensors").exists()
        if not self.forgets:
            self.held[adapter.id] = adapter
        if self.fault:
            raise self.fault

    async def unload(self, adapter_id: int) -> None:
        self._alive()
        if not self.sticky:
            self.held.pop(adapter_id, None)

    async def loaded(self) -> set[int]:
        self._alive()
        return set(self.held)

    async def generate(
        self, request_id: str, adapter: Adapter | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        self._alive()
        self.seen.append(adapter)
        self.started.set()
        await self.open.wait()
        if params.max_tokens < 1:
            raise ValueError("max_tokens must be at least 1")
        return ANSWER

    def close(self) -> None:
        self.dead = True

    def _alive(self) -> None:
        if self.dead:
            raise EngineDead("gone")


@pytest.fixture
def backend() -> HoldingBackend:
    return HoldingBackend()


@pytest.fixture
def engine(tmp_path: Path, backend: HoldingBackend) -> Engine:
    config = EngineConfig(
        name="e0", model="m", revision=None, dtype="float32", max_loras=2, max_rank=4, target_modules=("q_proj",),
        max_model_len=16, max_num_seqs=4, stage_root=str(tmp_path / "stage"),
    )  # fmt: skip
    return Engine(config, BaseModel(tmp_path, SHAPES, (2,), 32, True), backend)


def _version(n: int, uid: str = "u") -> VersionId:
    return VersionId(uid, "1.1", n)


async def _publish(engine: Engine, version: VersionId, adapter: RandomAdapter = GOOD) -> None:
    await engine.publish(version, adapter.manifest, adapter.buffer)


def _staged(tmp_path: Path) -> list[str]:
    return sorted(p.parent.name for p in tmp_path.rglob("adapter_config.json"))


async def test_a_published_version_is_listed_and_used(engine: Engine, backend: HoldingBackend) -> None:
    await _publish(engine, _version(1))
    assert (await engine.list()).adapters == ("u@1.1.v1",)
    assert await engine.generate("r", _version(1), [1], PARAMS) == ANSWER
    used = backend.seen[-1]
    assert used is not None and used.id in backend.held


async def test_publishing_twice_loads_once(engine: Engine, backend: HoldingBackend) -> None:
    await asyncio.gather(_publish(engine, _version(1)), _publish(engine, _version(1)))
    await _publish(engine, _version(1))
    assert list(backend.held) == [1]


async def test_a_version_cannot_change_its_content(engine: Engine) -> None:
    await _publish(engine, _version(1))
    with pytest.raises(RunError, match="immutable"):
        await _publish(engine, _version(1), random_adapter(SHAPES, rank=4, seed=9))


async def test_ids_and_names_are_never_reused(engine: Engine, backend: HoldingBackend) -> None:
    seen: list[Adapter] = []
    for _ in range(3):
        await _publish(engine, _version(1))
        seen.extend(backend.held.values())
        await engine.retire(_version(1))
    assert len({a.id for a in seen}) == len({a.name for a in seen}) == 3


async def test_a_full_engine_refuses_and_keeps_what_it_has(engine: Engine) -> None:
    await asyncio.gather(_publish(engine, _version(1)), _publish(engine, _version(2)))
    with pytest.raises(Retryable, match=r"engine full.*2 of maxLoras 2"):
        await _publish(engine, _version(3))
    assert (await engine.list()).adapters == ("u@1.1.v1", "u@1.1.v2")
    await engine.retire(_version(1))
    await _publish(engine, _version(3))


async def test_publishes_under_way_count_as_room_taken(engine: Engine) -> None:
    outcomes = await asyncio.gather(*(_publish(engine, _version(n)) for n in range(1, 5)), return_exceptions=True)
    assert [isinstance(o, Retryable) for o in outcomes] == [False, False, True, True]


async def test_a_refused_adapter_leaves_nothing(engine: Engine, backend: HoldingBackend, tmp_path: Path) -> None:
    await _publish(engine, _version(1))
    backend.fault = RuntimeError("no kernel for this")
    with pytest.raises(RunError, match="no kernel for this") as caught:
        await _publish(engine, _version(2))
    assert caught.value.reason == "PublishError"
    assert list(backend.held) == [1]
    assert _staged(tmp_path) == ["v1"]


async def test_a_version_that_the_server_does_not_list_is_an_error(
    engine: Engine, backend: HoldingBackend, tmp_path: Path
) -> None:
    backend.forgets = True
    with pytest.raises(RunError, match="did not list it"):
        await _publish(engine, _version(1))
    assert _staged(tmp_path) == []
    with pytest.raises(Retryable, match="not resident"):
        await engine.generate("r", _version(1), [1], PARAMS)


async def test_a_damaged_buffer_never_reaches_the_server(engine: Engine, backend: HoldingBackend) -> None:
    with pytest.raises(RunError, match="buffer of bytes"):
        await engine.publish(_version(1), GOOD.manifest, GOOD.buffer[:-4])
    assert backend.held == {}
    await _publish(engine, _version(1))  # the failure took no room for good


async def test_a_folder_that_cannot_be_written_fails_the_publish(engine: Engine, tmp_path: Path) -> None:
    own = next((tmp_path / "stage").iterdir())
    (own / "u").write_text("a file where the folder should be")
    with pytest.raises(RunError, match="stageRoot"):
        await _publish(engine, _version(1))


async def test_a_dead_engine_is_not_the_runs_fault(engine: Engine, backend: HoldingBackend) -> None:
    backend.dead = True
    with pytest.raises(Retryable):
        await _publish(engine, _version(1))


async def test_generate_never_loads(engine: Engine, backend: HoldingBackend) -> None:
    with pytest.raises(Retryable, match=r"u@1\.1\.v1: not resident"):
        await engine.generate("r", _version(1), [1], PARAMS)
    assert backend.seen == []


async def test_retire_waits_for_the_last_request(engine: Engine, backend: HoldingBackend, tmp_path: Path) -> None:
    await _publish(engine, _version(1))
    backend.open.clear()
    request = asyncio.create_task(engine.generate("r", _version(1), [1], PARAMS))
    await backend.started.wait()
    retiring = asyncio.create_task(engine.retire(_version(1)))
    done, _ = await asyncio.wait([retiring], timeout=0.05)
    assert not done and list(backend.held) == [1]
    with pytest.raises(Retryable, match="being retired"):
        await engine.generate("r2", _version(1), [1], PARAMS)
    backend.open.set()
    await asyncio.gather(request, retiring)
    assert backend.held == {} and _staged(tmp_path) == []
    assert (await engine.list()).adapters == ()


async def test_retiring_what_is_not_here_is_done(engine: Engine) -> None:
    await engine.retire(_version(7))


async def test_a_version_that_stays_listed_is_not_retired(engine: Engine, backend: HoldingBackend) -> None:
    await _publish(engine, _version(1))
    backend.sticky = True
    with pytest.raises(Retryable, match="still lists it"):
        await engine.retire(_version(1))
    assert (await engine.list()).adapters == ("u@1.1.v1",)
    backend.sticky = False
    await engine.retire(_version(1))
    assert (await engine.list()).adapters == ()


async def test_an_adopting_runtime_keeps_only_what_it_names(engine: Engine) -> None:
    await asyncio.gather(_publish(engine, _version(1)), _publish(engine, _version(1, "w")))
    assert await engine.retire_all_except([_version(1)]) == (_version(1, "w"),)
    assert (await engine.list()).adapters == ("u@1.1.v1",)


async def test_abort_ends_only_requests_with_the_prefix(engine: Engine, backend: HoldingBackend) -> None:
    backend.open.clear()
    ours = [asyncio.create_task(engine.generate(f"u::{i}", None, [1], PARAMS)) for i in (1, 1)]
    other = asyncio.create_task(engine.generate("w::1", None, [1], PARAMS))
    while len(backend.seen) < 3:
        await asyncio.sleep(0)
    assert await engine.abort("u::") == 2
    for outcome in await asyncio.gather(*ours, return_exceptions=True):
        assert isinstance(outcome, Retryable) and "aborted" in str(outcome)
    backend.open.set()
    assert await other == ANSWER


async def test_a_cancelled_caller_frees_its_version(engine: Engine, backend: HoldingBackend) -> None:
    await _publish(engine, _version(1))
    backend.open.clear()
    request = asyncio.create_task(engine.generate("r", _version(1), [1], PARAMS))
    await backend.started.wait()
    request.cancel()
    with pytest.raises(asyncio.CancelledError):
        await request
    await engine.retire(_version(1))
    assert backend.held == {}


@pytest.mark.parametrize("prompt", [[], [-1], [32], [1] * 16])
async def test_a_prompt_that_could_hurt_others_is_refused(
    engine: Engine, backend: HoldingBackend, prompt: list[int]
) -> None:
    with pytest.raises(RunError, match="prompt of") as caught:
        await engine.generate("r", None, prompt, PARAMS)
    assert caught.value.reason == "DataError" and backend.seen == []


async def test_parameters_that_the_server_refuses_fail_the_run(engine: Engine) -> None:
    with pytest.raises(RunError, match="max_tokens") as caught:
        await engine.generate("r", None, [1], replace(PARAMS, max_tokens=0))
    assert caught.value.reason == "InvalidSpec"


async def test_a_dead_server_never_looks_alive(engine: Engine, backend: HoldingBackend) -> None:
    await _publish(engine, _version(1))
    backend.dead = True
    with pytest.raises(Retryable):
        await engine.list()
    with pytest.raises(Retryable):
        await engine.probe()


async def test_shutdown_ends_requests_and_files(engine: Engine, backend: HoldingBackend, tmp_path: Path) -> None:
    await _publish(engine, _version(1))
    backend.open.clear()
    request = asyncio.create_task(engine.generate("r", _version(1), [1], PARAMS))
    await backend.started.wait()
    await engine.shutdown()
    with pytest.raises(Retryable):
        await request
    assert backend.dead and _staged(tmp_path) == []


def test_the_folder_of_a_dead_predecessor_is_deleted(tmp_path: Path) -> None:
    dead, alive, other = (tmp_path / name for name in ("e0.4194305", "e0.1", "e1.4194305"))  # above the largest pid
    for directory in (dead, alive, other):
        directory.mkdir()
    own = own_directory(tmp_path, "e0")
    assert own.is_dir() and not dead.exists() and alive.exists() and other.exists()

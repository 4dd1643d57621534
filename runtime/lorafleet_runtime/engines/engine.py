"""One engine: which adapter versions it holds, who uses them, and how they come and go.

A version is immutable. It is published once (checked, staged into a directory of its own, loaded, verified by the
server's own listing), used by any number of requests, and retired when the last of them has ended.

    publish  ->  _publishing[version]  ->  _resident[version]  ->  retire waits for `idle`  ->  unload, verify, delete
                                            ^ generate holds it (in_flight) and never loads anything itself

Everything runs on one event loop; only hashing and files go to a thread. Called by the actor; importing this module
imports torch, so the environment of `settings.environment` must be set before.
"""

import asyncio
import logging
import os
import shutil
import time
from collections.abc import Buffer, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.engines.backend import Adapter, Backend, EngineDead
from lorafleet_runtime.engines.reap import process_tree
from lorafleet_runtime.engines.settings import EngineConfig
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.publish.base_model import BaseModel
from lorafleet_runtime.publish.manifest import AdapterLimits, check_adapter, publish_error
from lorafleet_runtime.publish.stage import stage, unstage, version_directory
from lorafleet_runtime.types import Completion, EngineStatus, Manifest, SamplingParams, VersionId

log = logging.getLogger(__name__)

Completions = list[Completion]


@dataclass(slots=True)
class _Resident:
    """A version that the server holds."""

    adapter: Adapter
    digest: str
    idle: asyncio.Event
    in_flight: int = 0
    retiring: asyncio.Task[None] | None = None


@dataclass(slots=True)
class _Request:
    task: asyncio.Task[Completions]
    aborted: bool = False


@dataclass(slots=True)
class _Counters:
    requests: int = 0
    tokens: int = 0
    publishes: int = 0
    publish_failures: int = 0
    last_publish_seconds: float = 0.0


@dataclass(slots=True)
class _State:
    """Adapter versions by their life stage, and the requests that run."""

    resident: dict[VersionId, _Resident] = field(default_factory=dict)
    publishing: dict[VersionId, asyncio.Task[None]] = field(default_factory=dict)
    digests: dict[VersionId, str] = field(default_factory=dict)
    """Of the versions that are publishing."""
    names: dict[int, str] = field(default_factory=dict)
    """Every id that the server may hold, to the name of its version."""
    requests: dict[str, _Request] = field(default_factory=dict)
    last_id: int = 0
    last_request: int = 0


class Engine:
    """Serves the base model and every resident adapter version.

    Args:
        config: how it was started.
        base: what the base model's files say.
        backend: the server.
    """

    def __init__(self, config: EngineConfig, base: BaseModel, backend: Backend) -> None:
        self._config = config
        self._backend = backend
        self._vocab_size = base.vocab_size
        self._limits = AdapterLimits(config.max_rank, config.target_modules, base.linear_shapes)
        self._root = own_directory(Path(config.stage_root), config.name)
        self._state = _State()
        self._counters = _Counters()

    async def publish(self, version: VersionId, manifest: Manifest, buffer: Buffer) -> None:
        """Make a version resident, or change nothing.

        Idempotent: a version that is resident (or on its way) with the same digest is not loaded again. Cancelling
        the call does not stop a load that has begun. In-flight requests of other versions go on.

        Args:
            version: its identity; never reused.
            manifest: what the buffer holds.
            buffer: the adapter's bytes; read before this returns.

        Raises:
            RunError: PublishError; the adapter is bad or the server refused it.
            Retryable: no room until another version is retired, or the engine is gone.
        """
        held = self._state.resident.get(version)
        if held is not None:
            if held.retiring is not None:
                raise Retryable(f"version {version.name}: is being retired on {self._config.name}")
            if held.digest != manifest.digest:
                fix = f"the version is immutable and has {held.digest}; publish the next one"
                raise publish_error("digest", manifest.digest, fix)
            return
        task = self._state.publishing.get(version)
        if task is not None and self._state.digests[version] != manifest.digest:
            fix = f"the version is being loaded with {self._state.digests[version]}; publish the next one"
            raise publish_error("digest", manifest.digest, fix)
        if task is None:
            self._check_room()
            data = memoryview(buffer).cast("B")
            task = asyncio.get_running_loop().create_task(self._publish(version, manifest, data))
            self._state.publishing[version] = task
            self._state.digests[version] = manifest.digest
            task.add_done_callback(lambda _: self._published(version))
        await asyncio.shield(task)

    async def generate(
        self, request_id: str, version: VersionId | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Completions:
        """Sample from one version, or from the base model.

        Args:
            request_id: the caller's name for it, for abort; need not be unique.
            version: a resident version; None is the base model. Never loads anything.
            prompt_ids: P token ids.
            params: what is not in it is sent as neutral.

        Returns:
            params.n completions.

        Raises:
            Retryable: the version is not resident, the request was aborted, or the engine is gone.
            RunError: InvalidSpec or DataError; prompt or parameters cannot be served.
        """
        self._check_prompt(prompt_ids)
        held = self._hold(version)
        state = self._state
        state.last_request += 1
        unique = f"{request_id}#{state.last_request}"  # a repeated request must not collide with its first try
        adapter = held.adapter if held else None
        loop = asyncio.get_running_loop()
        request = _Request(loop.create_task(self._backend.generate(unique, adapter, prompt_ids, params)))
        state.requests[unique] = request
        try:
            completions = await request.task
        except asyncio.CancelledError:
            if request.aborted:
                raise Retryable(f"request {request_id}: aborted on {self._config.name}") from None
            raise
        except ValueError as error:
            raise RunError(reasons.INVALID_SPEC, f"sampling: {error}") from error
        finally:
            del state.requests[unique]
            self._release(held)
        self._counters.requests += 1
        self._counters.tokens += sum(len(c.token_ids) for c in completions)
        return completions

    async def abort(self, prefix: str) -> int:
        """Abort every request whose id starts with `prefix`; their callers get Retryable.

        Returns:
            How many were aborted.
        """
        found = [r for name, r in self._state.requests.items() if name.startswith(prefix)]
        for request in found:
            request.aborted = True
            request.task.cancel()
        if found:
            await asyncio.wait([r.task for r in found])
        return len(found)

    async def retire(self, version: VersionId) -> None:
        """Take a version out once its last request has ended, and delete its directory.

        New requests for it are refused at once. Idempotent: a version that is not here is retired. To be quick,
        abort its requests first.

        Raises:
            Retryable: the server still lists it, or the engine is gone.
        """
        publishing = self._state.publishing.get(version)
        if publishing is not None:
            await asyncio.wait([publishing])
        held = self._state.resident.get(version)
        if held is None:
            return
        if held.retiring is None:
            held.retiring = asyncio.get_running_loop().create_task(self._retire(version, held))
        await asyncio.shield(held.retiring)

    async def retire_all_except(self, versions: Iterable[VersionId]) -> tuple[VersionId, ...]:
        """Retire every version that is not in `versions`: what a new runtime does with an engine that it adopts.

        Returns:
            The versions that were retired.

        Raises:
            Retryable: the server still lists one, or the engine is gone.
        """
        keep = set(versions)
        gone = tuple(v for v in (*self._state.resident, *self._state.publishing) if v not in keep)
        await asyncio.gather(*(self.retire(version) for version in gone))
        return gone

    async def list(self) -> EngineStatus:
        """What this engine holds, by the server's own listing.

        Raises:
            Retryable: the engine is gone, and every adapter with it.
        """
        ids = await self._backend.loaded()
        names = tuple(sorted(self._state.names.get(i, f"unknown-id-{i}") for i in ids))
        return EngineStatus(
            engine=self._config.name,
            ready=not self._backend.dead,
            adapters=names,
            listed_at=time.time(),
            pids=process_tree(),
            stats=self._stats(),
        )

    async def probe(self) -> None:
        """Sample one token from the base model.

        Raises:
            Retryable: the engine is gone. A caller that waits for a hung one sets its own time limit.
        """
        params = SamplingParams(n=1, temperature=0.0, top_p=1.0, max_tokens=1)
        await self.generate("probe", None, [0], params)

    async def shutdown(self) -> None:
        """Abort everything, end the server's processes and delete every staged directory."""
        await self.abort("")
        self._backend.close()
        await asyncio.to_thread(shutil.rmtree, self._root, ignore_errors=True)

    def _published(self, version: VersionId) -> None:
        self._state.publishing.pop(version, None)
        self._state.digests.pop(version, None)

    def _check_room(self) -> None:
        used = len(self._state.resident) + len(self._state.publishing)
        if used >= self._config.max_loras:
            raise Retryable(
                f"engine full: {self._config.name} holds {used} of maxLoras {self._config.max_loras} versions; "
                "it frees up when a version is retired"
            )

    async def _publish(self, version: VersionId, manifest: Manifest, buffer: memoryview) -> None:
        start = time.monotonic()
        try:
            directory = version_directory(self._root, version)
            await asyncio.to_thread(check_adapter, manifest, buffer, self._limits)
            await self._load(version, manifest, buffer, directory)
        except BaseException:
            self._counters.publish_failures += 1
            raise
        self._counters.publishes += 1
        self._counters.last_publish_seconds = time.monotonic() - start

    async def _load(self, version: VersionId, manifest: Manifest, buffer: memoryview, directory: Path) -> None:
        state = self._state
        state.last_id += 1
        adapter = Adapter(state.last_id, f"{version.name}#{state.last_id}", str(directory))
        try:
            await asyncio.to_thread(stage, manifest, buffer, directory)
            state.names[adapter.id] = version.name
            await self._backend.load(adapter)
            if adapter.id not in await self._backend.loaded():
                raise publish_error("version", version.name, "the engine did not list it after loading; see its log")
        except (EngineDead, RunError):
            await self._discard(adapter, directory)
            raise
        except OSError as error:
            await self._discard(adapter, directory)
            raise publish_error("stageRoot", self._config.stage_root, f"cannot be written ({error})") from error
        except Exception as error:
            await self._discard(adapter, directory)
            raise publish_error("version", version.name, f"vLLM refused it: {error}") from error
        idle = asyncio.Event()
        idle.set()
        state.resident[version] = _Resident(adapter, manifest.digest, idle)

    async def _discard(self, adapter: Adapter, directory: Path) -> None:
        """After a failed publish: leave nothing of it on the server or on disk."""
        try:
            await self._backend.unload(adapter.id)
            if adapter.id not in await self._backend.loaded():
                self._state.names.pop(adapter.id, None)
        except EngineDead:
            log.warning("engine %s died while it discarded %s", self._config.name, adapter.name)
        await asyncio.to_thread(unstage, self._root, directory)

    async def _retire(self, version: VersionId, held: _Resident) -> None:
        try:
            await held.idle.wait()
            await self._backend.unload(held.adapter.id)
            if held.adapter.id in await self._backend.loaded():
                raise Retryable(f"version {version.name}: {self._config.name} still lists it after removal")
        except BaseException:
            held.retiring = None
            raise
        del self._state.resident[version]
        del self._state.names[held.adapter.id]
        await asyncio.to_thread(unstage, self._root, Path(held.adapter.path))

    def _hold(self, version: VersionId | None) -> _Resident | None:
        if version is None:
            return None
        held = self._state.resident.get(version)
        if held is None or held.retiring is not None:
            word = "not resident" if held is None else "being retired"
            raise Retryable(f"version {version.name}: {word} on {self._config.name}; publish it first")
        held.in_flight += 1
        held.idle.clear()
        return held

    def _release(self, held: _Resident | None) -> None:
        if held is None:
            return
        held.in_flight -= 1
        if held.in_flight == 0:
            held.idle.set()

    def _check_prompt(self, prompt_ids: Sequence[int]) -> None:
        # vLLM does not check for ids below 0; one of them would crash the engine for everybody.
        if not prompt_ids or min(prompt_ids) < 0 or max(prompt_ids) >= self._vocab_size:
            raise RunError(
                reasons.DATA_ERROR, f"prompt of {len(prompt_ids)} tokens: needs ids from 0 to {self._vocab_size - 1}"
            )
        if len(prompt_ids) >= self._config.max_model_len:
            raise RunError(
                reasons.DATA_ERROR,
                f"prompt of {len(prompt_ids)} tokens: the engine's maxModelLen is {self._config.max_model_len}; "
                "lower the run's maxPromptTokens",
            )

    def _stats(self) -> dict[str, float]:
        counters = self._counters
        return {
            "max_loras": self._config.max_loras,
            "requests_in_flight": len(self._state.requests),
            "requests_total": counters.requests,
            "tokens_total": counters.tokens,
            "publishes_total": counters.publishes,
            "publish_failures_total": counters.publish_failures,
            "last_publish_seconds": counters.last_publish_seconds,
        }


def own_directory(root: Path, engine: str) -> Path:
    """Make this process's folder `{root}/{engine}.{pid}`, and delete those of the engine's dead predecessors."""
    root.mkdir(parents=True, exist_ok=True)
    for left in root.glob(f"{engine}.*"):
        pid = left.name.removeprefix(f"{engine}.")
        if pid.isdigit() and not psutil.pid_exists(int(pid)):
            shutil.rmtree(left, ignore_errors=True)
    own = root / f"{engine}.{os.getpid()}"
    shutil.rmtree(own, ignore_errors=True)
    own.mkdir()
    return own

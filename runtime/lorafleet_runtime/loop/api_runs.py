"""Runs made through /adapter_runs: durable before they are answered, back after a restart, never the operator's.

    POST ─▶ checks ─▶ record on storage ─▶ registry         DELETE ─▶ record says retired ─▶ registry
    boot ─▶ records ─▶ registry: live runs go on from their checkpoints, ended ones come back as records
    keep: start time, target and end of each run follow into its record; exports are copied to `save`

consumes: HTTP calls, registry changes      produces: registry calls, {storage}/.lorafleet/{pool}/runs/{uid}.json
waits for: the signal, or a retry           unblocked by: any registry change
One lock orders all writes of records. After an await the registry is looked at again.
"""

import asyncio
import errno
import logging
import time
import uuid
from collections.abc import Container
from pathlib import Path
from typing import Any

from lorafleet_api.v1alpha1 import reasons
from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_runtime.errors import RunError
from lorafleet_runtime.loop.api_config import NAME, ConfigProblem, explain, to_spec, users_field
from lorafleet_runtime.loop.api_files import newest_checkpoint, read_records, remove_durably
from lorafleet_runtime.loop.exports import check_target, export, is_there
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.admission import SpecProblem, check_limits, parse_spec
from lorafleet_runtime.registry.api_owned import DELETED_TEXT, NAMESPACE, Record, observe, restore
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import TERMINAL, Run
from lorafleet_runtime.rewards.resolve import resolve_reward
from lorafleet_runtime.storage import inside, write_durably

log = logging.getLogger(__name__)

RETRY_SECONDS = 5.0
KEPT_ENDED = 1024
"""Records of ended runs; beyond, the oldest are forgotten. Their files stay."""

_RESERVED = frozenset({"state"})
_FULL = (errno.ENOSPC, errno.EDQUOT)


class Refused(Exception):
    """A call that changed nothing.

    Args:
        status: HTTP status.
        field: what is wrong.
        value: what was received; None where the fix says it.
        fix: what is wrong, and what to do.
    """

    def __init__(self, status: int, field: str, value: object, fix: str) -> None:
        super().__init__(f"{field}: {fix}" if value is None else f"{field}: {value!r:.300}: {fix}")
        self.status, self.field, self.value, self.fix = status, field, value, fix


class ApiRuns:
    """All API-owned runs of one pool.

    Args:
        registry: where they live beside the operator's.
        signal: set on every registry change.
        folder: of the records.
        storage_root: checkpoints, data and exports.
    """

    def __init__(self, registry: Registry, signal: Signal, folder: Path, storage_root: Path) -> None:
        self._registry = registry
        self._signal = signal
        self._folder = folder
        self._root = storage_root
        self._records: dict[str, Record] = {}
        """What is durable, by uid."""
        self._open: dict[str, None] = {}
        """Of these, in order, those that may still change or owe an export. The others cost no look."""
        self._export_again: dict[str, float] = {}
        """Monotonic time before which a failed export is not tried again, by uid."""
        self._hopeless_exports: dict[str, int] = {}
        """Step that no retry would copy, by uid."""
        self._unwanted: dict[str, None] = {}
        """Runs whose files could not be removed yet."""
        self._lock = asyncio.Lock()

    # --- boot ------------------------------------------------------------------------------------------------

    def restore(self) -> None:
        """Bring back every recorded run. A file that cannot be used is reported and left alone."""
        for record in read_records(self._folder):
            try:
                run = restore(self._registry, record, newest_checkpoint(self._root, record))
            except SpecProblem as error:
                log.error("%s: not restored: %s; correct the file or remove it", self._path(record.uid), error)
                continue
            self._take(record)
            log.info("API-owned run %s (%s) is back: %s", record.name, record.uid, run.state)

    # --- calls -----------------------------------------------------------------------------------------------

    def runs(self) -> list[Run]:
        """Every API-owned run, oldest first."""
        return sorted((r for r in self._registry.runs.values() if r.owner == "api"), key=lambda r: (r.created, r.uid))

    def find(self, name: str) -> Run | None:
        """The newest run of that name."""
        return next((r for r in reversed(self.runs()) if r.name == name), None)

    def record(self, run: Run) -> Record:
        """What is kept of a run."""
        return self._records[run.uid]

    async def post(self, name: str, config: dict[str, Any]) -> Run:
        """Register a run.

        Raises:
            Refused: 400 or 422 for name or configuration, 409 without a free slot, 503 before the operator has told
                its runs again, 507 or 503 when storage does not take the record. Nothing is registered then.
        """
        async with self._lock:
            record = await asyncio.to_thread(self._admit, name, config)
            self._check_free(record)
            try:
                await self._write(record)
                self._check_free(record)  # the operator may have spoken meanwhile; no await from here to `put`
            except Refused:
                await self._discard(record.uid)  # a write may fail after its rename, too
                raise
            replaced = [old.uid for old in self.runs() if old.name == name]
            self._take(record)
            run = self._registry.put(
                record.uid,
                dict(record.spec),
                namespace=NAMESPACE,
                name=name,
                generation=1,
                created=record.created,
                owner="api",
            )
            for uid in replaced:  # it is registered: nothing below may take the answer away
                await self._discard(uid)
            return run

    async def retire(self, name: str) -> Run:
        """Take a run from training for good; its record stays. A run that has ended, or is about to, is left alone.

        Raises:
            Refused: 404 for an unknown name; 507 or 503 when storage does not take the intent.
        """
        async with self._lock:
            run = self.find(name)
            if run is None:
                raise Refused(404, "name", name, "is not known here; GET /adapter_runs lists what is")
            record = self._records[run.uid]
            if run.state not in TERMINAL and run.ending is None:
                retired = observe(record, run).model_copy(update={"retired": True})
                await self._write(retired)
                self._records[run.uid] = retired
                self._registry.retire(run.uid, "Cancelled", reasons.CANCELLED, DELETED_TEXT, save=True)
            return run

    def _admit(self, name: str, config: dict[str, Any]) -> Record:
        """Every check that needs no slot; looks at storage, so it runs in a thread."""
        if not NAME.fullmatch(name) or name in _RESERVED:
            fix = "use 1 to 253 letters, digits, '.', '_' and '-', a letter or digit first; 'state' is a route"
            raise Refused(400, "name", name, fix)
        try:
            wire, save = to_spec(config)
            try:
                spec = parse_spec(wire, self._registry.pool)
            except SpecProblem as error:
                raise explain(error) from error
            self._check_usable(spec)
            target = None if save is None else str(check_target(self._root, save))
        except ConfigProblem as error:
            raise Refused(422 if error.malformed else 400, error.field, error.value, error.fix) from error
        return Record(uid=str(uuid.uuid4()), name=name, spec=wire, save=target, created=time.time())

    def _check_usable(self, spec: AdapterRunSpec) -> None:
        try:
            check_limits(spec, self._registry.pool)
            resolve_reward(spec, self._registry.pool.reward_modules)
        except RunError as error:
            field, _, fix = error.message.partition(": ")
            raise ConfigProblem(users_field(field), None, fix) from error
        if "://" in spec.data:
            return
        try:
            path = inside(self._root, spec.data)
        except ValueError as error:
            raise ConfigProblem("data", spec.data, str(error)) from error
        if not path.is_file():
            raise ConfigProblem("data", spec.data, "is no file on the pool's storage; upload it or correct the path")

    def _check_free(self, wanted: Record) -> None:
        for run in (r for r in self.runs() if r.state not in TERMINAL):
            if run.name == wanted.name:
                fix = f"is {run.state}; DELETE it and wait for COMPLETED, or use another name"
                raise Refused(400, "name", run.name, fix)
            if wanted.save is not None and self._records[run.uid].save == wanted.save:
                fix = f"the live run {run.name!r} saves there; use another directory"
                raise Refused(400, "save", wanted.save, fix)
        if self._registry.operator_epoch and not self._registry.synced:
            fix = "the operator has not told since the runtime's start which slots its runs hold; try again in a moment"
            raise Refused(503, "slots", None, fix)
        slots = self._registry.slots()
        if slots.used + slots.queued >= slots.total:
            taken = f"{slots.used} of {slots.total} taken, {slots.queued} waited for"
            raise Refused(409, "slots", taken, "only runs made as objects queue; try again when one is free")

    # --- what follows from the registry ----------------------------------------------------------------------

    async def keep(self) -> None:
        """Let records and exports follow the registry, for ever."""
        while True:
            try:
                await self.flush()
            except (OSError, Refused) as error:
                log.error("records of API-owned runs: %s; trying again in %.0f s", error, RETRY_SECONDS)
                await asyncio.sleep(RETRY_SECONDS)  # not the signal: every event would be another try
            else:
                await self._signal.wait(self._seconds_to_retry())

    async def flush(self) -> None:
        """Bring every record up to date, and after them the exports whose time has come.

        Each record is tried once, whatever becomes of the others; an export that fails is tried again by a later call,
        RETRY_SECONDS from then. When it returns, nothing has changed since its last look.

        Raises:
            Refused, OSError: storage takes a record, or the removal of one, no more at the moment; the first such
                problem. The others were tried all the same.
        """
        problems: dict[str, Exception] = {}
        while True:
            if (uid := self._unrecorded(problems)) is not None:
                work = self._follow(uid)
            elif (uid := self._removable(problems)) is not None:
                work = self._remove(uid)
            elif (uid := self._unexported()) is not None:
                work = self._export(uid)
            else:
                break
            try:
                await work
            except (OSError, Refused) as error:
                problems[uid] = error
        for problem in problems.values():
            raise problem

    def _unrecorded(self, tried: Container[str]) -> str | None:
        for uid in list(self._open):
            run, record = self._registry.runs.get(uid), self._records[uid]
            if run is None or uid in tried:
                continue
            if observe(record, run) != record:
                return uid
            if run.state in TERMINAL and not self._owes(record, run):
                del self._open[uid]
        return None

    async def _follow(self, uid: str) -> None:
        async with self._lock:
            run, record = self._registry.runs.get(uid), self._records.get(uid)
            if run is not None and record is not None and (seen := observe(record, run)) != record:
                await self._write(seen)
                self._records[uid] = seen

    def _unexported(self) -> str | None:
        now = time.monotonic()
        for uid in self._open:
            run = self._registry.runs.get(uid)
            if run is not None and self._owes(self._records[uid], run) and now >= self._export_again.get(uid, now):
                return uid
        return None

    def _owes(self, record: Record, run: Run) -> bool:
        """A checkpoint has not been copied to `save`, and that is not hopeless."""
        artifact, exported = run.artifact, -1 if record.exported_step is None else record.exported_step
        if record.save is None or artifact is None or artifact.step <= exported:
            return False
        return self._hopeless_exports.get(run.uid) != artifact.step

    async def _export(self, uid: str) -> None:
        run, record = self._registry.runs[uid], self._records[uid]
        artifact, save = run.artifact, record.save
        assert artifact is not None and save is not None
        try:
            await asyncio.to_thread(export, self._root, artifact, save)
            async with self._lock:
                if (now := self._records.get(uid)) is not None:
                    now = now.model_copy(update={"exported_step": artifact.step})
                    await self._write(now)
                    self._records[uid] = now
        except (OSError, ValueError, Refused) as error:
            why = f"run {run.name}: step {artifact.step} not copied to save {save}: {error}"
            if isinstance(error, ValueError) or not is_there(artifact):
                log.error("%s", why)
                self._hopeless_exports[uid] = artifact.step
                self._export_again.pop(uid, None)
                return
            if uid not in self._export_again:
                log.error("%s; trying again every %.0f s", why, RETRY_SECONDS)
            self._export_again[uid] = time.monotonic() + RETRY_SECONDS
        else:
            self._export_again.pop(uid, None)

    def _seconds_to_retry(self) -> float | None:
        waiting = [again for uid, again in self._export_again.items() if uid in self._open]
        return max(0.0, min(waiting) - time.monotonic()) if waiting else None

    def _removable(self, tried: Container[str]) -> str | None:
        """A file that should be gone, or the oldest ended run beyond the bound."""
        if (uid := next((uid for uid in self._unwanted if uid not in tried), None)) is not None:
            return uid
        ended = len(self._records) - sum(self._lives(uid) for uid in self._open)
        if ended <= KEPT_ENDED:
            return None
        return next((r.uid for r in self.runs() if r.state in TERMINAL and r.uid in self._records), None)

    def _lives(self, uid: str) -> bool:
        run = self._registry.runs.get(uid)
        return run is not None and run.state not in TERMINAL

    # --- files -----------------------------------------------------------------------------------------------

    def _path(self, uid: str) -> Path:
        return self._folder / f"{uid}.json"

    async def _write(self, record: Record) -> None:
        try:
            await asyncio.to_thread(write_durably, self._path(record.uid), record.to_wire())
        except OSError as error:
            full = error.errno in _FULL
            fix = "free space and try again" if full else "repair the volume and try again"
            text = f"storage did not take the record ({error.strerror or error}); nothing was changed; {fix}"
            raise Refused(507 if full else 503, "storage", str(self._folder), text) from error

    def _take(self, record: Record) -> None:
        self._records[record.uid] = record
        self._open[record.uid] = None

    async def _discard(self, uid: str) -> None:
        """Remove a record; storage that refuses is asked again by `flush`."""
        try:
            await self._remove(uid)
        except OSError as error:
            path = self._path(uid)
            log.error("%s should be gone and cannot be removed (%s); trying again; remove it by hand", path, error)
            self._signal.set()

    async def _remove(self, uid: str) -> None:
        self._registry.delete(uid)
        for known in (self._records, self._open, self._export_again, self._hopeless_exports):
            known.pop(uid, None)
        self._unwanted[uid] = None
        await asyncio.to_thread(remove_durably, self._path(uid))
        self._unwanted.pop(uid, None)

"""A runtime's HTTP API with miles' routes over a real registry; its trainer and engines are played by the test.

`Miles.at(tmp_path)` is a runtime; calling it again with the same folder is the next one after a kill.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from prometheus_client import CollectorRegistry

from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.api_runs import ApiRuns
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import Run
from lorafleet_runtime.types import Artifact, Cursor, EngineStatus, Loaded, PolicySums, StepResult
from support.runs import DATASET, pool_spec


@dataclass
class Miles:
    """One runtime process."""

    root: Path
    registry: Registry
    runs: ApiRuns
    client: httpx.AsyncClient

    @classmethod
    def at(cls, root: Path, boot_epoch: int = 1, operator_epoch: int = 0, **pool: Any) -> "Miles":
        """A runtime that has just started on this storage."""
        (root / "train.jsonl").write_text('{"text": "1 plus", "label": "1"}\n')
        signal = Signal()
        registry = Registry(pool_spec(**pool), boot_epoch, signal.set)
        registry.fence(operator_epoch)
        runs = ApiRuns(registry, signal, root / ".lorafleet" / "default-pool" / "runs", root)
        runs.restore()
        app = create_app(FleetView(registry, signal, root), lambda: "secret", CollectorRegistry(), adapter_runs=runs)
        client = httpx.AsyncClient(
            transport=httpx.ASGITransport(app=app),
            base_url="http://runtime",
            headers={"Authorization": "Bearer secret"},
        )
        return cls(root, registry, runs, client)

    def restarted(self, **options: Any) -> "Miles":
        """The runtime that is started after this one was killed."""
        return Miles.at(self.root, self.registry.boot_epoch + 1, **options)

    @property
    def files(self) -> list[Path]:
        """The records on storage."""
        return sorted((self.root / ".lorafleet" / "default-pool" / "runs").glob("*"))

    async def post(self, name: str, **config: Any) -> httpx.Response:
        """POST a run that fits the pool."""
        return await self.client.post("/adapter_runs", json={"name": name, "config": miles_config(**config)})

    async def state(self, name: str) -> str | None:
        """What the state route tells."""
        states = (await self.client.get("/adapter_runs/state", params={"names": name})).json()["states"]
        found: str | None = states[name]
        return found

    def run(self, name: str) -> Run:
        """The newest run of that name."""
        run = self.runs.find(name)
        assert run is not None
        return run

    def activate(self, name: str, step: int = 0) -> Run:
        """Data checked, slot given, loaded at `step`, first version published."""
        run = self.run(name)
        self.registry.checked(run.uid, DATASET)
        self.registry.assign()
        self.registry.loaded(Loaded(run.uid, step, Cursor()), now=90.0)
        self.registry.published(run.uid, 1, now=100.0)
        return run

    def step(self, run: Run) -> None:
        """One optimizer step."""
        self.registry.commit(run.uid, run.groups_per_step, [], PolicySums())
        self.registry.stepped(StepResult(run.uid, run.step + 1, 1e-3, 0.5), now=100.0 + run.step)

    def save(self, run: Run) -> Artifact:
        """The last checkpoint becomes durable."""
        directory = self.root / "api" / run.name / run.uid / f"step_{run.step}"
        directory.mkdir(parents=True, exist_ok=True)
        (directory / "adapter_model.safetensors").write_bytes(b"weights of step %d" % run.step)
        (directory / "adapter_config.json").write_text("{}")
        (directory / "state.json").write_text("{}")
        artifact = Artifact(str(directory), run.step, "digest")
        self.registry.saved(run.uid, artifact, now=200.0)
        return artifact

    def clear(self, run: Run) -> None:
        """Trainer and engines list nothing of it."""
        self.registry.observe_trainer({})
        self.registry.observe_engine(EngineStatus("engine-0", True, (), 1.0))
        assert self.registry.cleaned(run.uid)


async def trained_to(miles: Miles, name: str, step: int) -> Any:
    """A run that was started and has done some steps, with its record up to date."""
    assert (await miles.post(name)).status_code == 200
    run = miles.activate(name)
    for _ in range(step):
        miles.step(run)
    await miles.runs.flush()
    return run


async def ended(miles: Miles, name: str) -> Any:
    """A run that never trained and is over."""
    assert (await miles.post(name)).status_code == 200
    await miles.client.delete(f"/adapter_runs/{name}")
    await miles.runs.flush()
    return miles.run(name)


def miles_config(**changes: Any) -> dict[str, Any]:
    """A run of two groups of two samples per step, three steps, as users of miles write it."""
    config: dict[str, Any] = {
        "data": "train.jsonl",
        "label_key": "label",
        "rm_type": "math",
        "rank": 4,
        "rollout_batch_size": 2,
        "n_samples_per_prompt": 2,
        "num_step": 3,
        "max_staleness": 0,
        "sampling": {"max_tokens": 8},
    }
    return {key: value for key, value in (config | changes).items() if value is not ...}

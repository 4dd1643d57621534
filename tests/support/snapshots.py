"""A world of runs for the stories of `make demo-full`: set what runs are like, get the snapshot that shows it."""

from dataclasses import dataclass, field
from typing import Any

from lorafleet_api.v1alpha1.wire import AdapterList
from lorafleet_local.stories import Snapshot


@dataclass
class World:
    """Runs by name, as API server and runtime show them."""

    at: float = 0.0
    runs: dict[str, dict[str, Any]] = field(default_factory=dict)
    """step, target, slot, held (by the trainer), state, restarts, queued (its position), conditions
    {kind: (status, reason, message)}."""

    def set(self, name: str, **changes: Any) -> None:
        """Change a run, or make it; `conditions` are added to those that it has."""
        run = self.runs.setdefault(
            name, {"step": 0, "slot": None, "held": False, "state": "QUEUED", "restarts": 0, "conditions": {}}
        )
        run["conditions"] = {**run["conditions"], **changes.pop("conditions", {})}
        run.update(changes)

    def train(self, name: str, slot: int, step: int = 0) -> None:
        """Registered in a slot."""
        registered = {"Registered": ("True", "Registered", "")}
        self.set(name, slot=slot, held=True, state="ACTIVE", step=step, queued=None, conditions=registered)

    def leave(self, name: str, state: str, **conditions: tuple[str, str, str]) -> None:
        """Held nowhere any more."""
        gone = {"Registered": ("False", state, "")}
        self.set(name, slot=None, held=False, state=state, conditions=gone | conditions)

    def snapshot(self) -> Snapshot:
        """One of now, a second after the last."""
        self.at += 1.0
        return Snapshot(self.at, {name: self._item(name) for name in self.runs}, self._listing())

    def _item(self, name: str) -> dict[str, Any]:
        run = self.runs[name]
        conditions = [
            {"type": kind, "status": status, "reason": reason, "message": message}
            for kind, (status, reason, message) in run["conditions"].items()
        ]
        status = {"step": run["step"], "targetStep": run.get("target", run["step"]), "conditions": conditions}
        if run.get("queued") is not None:
            status["queuePosition"] = run["queued"]
        return {"metadata": {"name": name, "uid": f"uid-{name}"}, "status": status}

    def _listing(self) -> AdapterList:
        held = {run["slot"]: f"uid-{name}" for name, run in self.runs.items() if run["held"]}
        views = [
            {
                "uid": f"uid-{name}", "namespace": "default", "name": name, "owner": "operator", "generation": 1,
                "state": run["state"], "reason": "", "message": "", "registered": run["held"], "slot": run["slot"],
                "step": run["step"], "restarts": run["restarts"],
            }
            for name, run in self.runs.items()
        ]  # fmt: skip
        engine = {"engine": "0", "ready": True, "adapters": [f"{uid}@1.1" for uid in held.values()], "listedAt": 0.0}
        return AdapterList.model_validate(
            {
                "bootEpoch": 1, "revision": 1, "synced": True, "operatorEpoch": 1, "listed": True,
                "slots": {"total": 4, "used": len(held), "queued": 0},
                "trainer": {"ready": True, "slots": held}, "engines": [engine], "adapters": views,
            }
        )  # fmt: skip

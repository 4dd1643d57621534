"""What the trainer and the engines say they hold: the only evidence that a run is gone. Pure."""

from collections.abc import Callable

from lorafleet_api.v1alpha1.wire import EngineView, PresenceView
from lorafleet_runtime.types import EngineStatus


class Listings:
    """The newest listing of the trainer and of each engine.

    Args:
        num_engines: engines of the pool.
        notify: runs after every visible change.
    """

    def __init__(self, num_engines: int, notify: Callable[[], None]) -> None:
        self.revision = 0
        self.engines: dict[str, EngineStatus] = {}
        self.trainer_ready = False
        self.trainer_slots: dict[int, str] = {}
        self._num_engines = num_engines
        self._notify = notify

    def observe_trainer(self, slots: dict[int, str]) -> None:
        """The trainer's own listing."""
        if slots != self.trainer_slots or not self.trainer_ready:
            self.trainer_slots = dict(slots)
            self.trainer_ready = True
            self._changed()

    def observe_engine(self, status: EngineStatus) -> None:
        """One engine's own listing."""
        old = self.engines.get(status.engine)
        self.engines[status.engine] = status
        if old is None or (old.adapters, old.ready) != (status.adapters, status.ready):
            self._changed()

    def presence(self, uid: str) -> PresenceView:
        """Who holds the run."""
        prefix = f"{uid}@"
        engines = [e.engine for e in self.engines.values() if any(a.startswith(prefix) for a in e.adapters)]
        return PresenceView(trainer=uid in self.trainer_slots.values(), engines=sorted(engines))

    def engine_views(self) -> list[EngineView]:
        """Every engine's own listing."""
        return [
            EngineView(engine=e.engine, ready=e.ready, adapters=list(e.adapters), listed_at=e.listed_at)
            for e in self.engines.values()
        ]

    @property
    def listed(self) -> bool:
        """The trainer and every engine have told what they hold since this runtime started."""
        return self.trainer_ready and len(self.engines) == self._num_engines

    def _changed(self) -> None:
        self.revision += 1
        self._notify()

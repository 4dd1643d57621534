"""What the HTTP layer sees of the fleet: the registry, the wake-up and where runs' records lie. Imports no torch."""

import time
from dataclasses import dataclass, field
from pathlib import Path

from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry


@dataclass(slots=True)
class FleetView:
    """The loop's face towards HTTP."""

    registry: Registry
    signal: Signal
    storage_root: Path
    heard: float = field(default_factory=time.monotonic)
    """Monotonic time of the newest operator's last call, at first of the start."""

    def fence(self, operator_epoch: int) -> None:
        """Registry.fence; an operator that passes was heard now."""
        self.registry.fence(operator_epoch)
        self.heard = time.monotonic()

    @property
    def ready(self) -> bool:
        """The operator has spoken, the trainer and at least one engine answer."""
        registry = self.registry
        return registry.synced and registry.trainer_ready and any(e.ready for e in registry.engines.values())

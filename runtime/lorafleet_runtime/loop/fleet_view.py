"""What the HTTP layer sees of the fleet: the registry, the wake-up and recent samples. Imports no ray and no torch."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lorafleet_runtime.loop.signal import Signal
from lorafleet_runtime.registry.registry import Registry


@dataclass(slots=True)
class FleetView:
    """The loop's face towards HTTP."""

    registry: Registry
    signal: Signal
    samples: Callable[[str, int | None], list[dict[str, Any]]]
    """Recent groups of a run, newest last; of one step, or of all."""

    @property
    def ready(self) -> bool:
        """The operator has spoken, the trainer and at least one engine answer."""
        registry = self.registry
        return registry.synced and registry.trainer_ready and any(e.ready for e in registry.engines.values())

"""What the chaos tests put into the trainer's and the engine's process: a record of every step, and faults on demand.

Python imports it at the start of every process that has this folder on PYTHONPATH; it patches a module only when that
module is imported. Files in $LORAFLEET_CHAOS_DIR ask for a fault. There `steps.jsonl` gets one line per optimizer
step.
"""

import hashlib
import importlib.machinery
import json
import os
import resource
import signal
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

_FOLDER = os.environ.get("LORAFLEET_CHAOS_DIR")


def _patch_trainer(module: ModuleType) -> None:
    rank = module.TrainerRank
    accumulate, step = rank.accumulate, rank.step

    def aborting(self: Any, groups: Sequence[Any]) -> Any:
        if {group.uid for group in groups} & _lines("abort"):
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
        return accumulate(self, groups)

    def recorded(self: Any, uid: str, *arguments: Any) -> Any:
        before = _digest(self.adapter(uid).master)
        outcome = step(self, uid, *arguments)
        if hasattr(outcome, "step") and self._ranks.is_first:
            line = {"pid": os.getpid(), "time": time.time(), "uid": uid, "step": outcome.step}
            _append("steps.jsonl", line | {"before": before, "after": _digest(self.adapter(uid).master)})
        return outcome

    rank.accumulate, rank.step = aborting, recorded


def _patch_passes(module: ModuleType) -> None:
    one_pass = module._pass

    def torn(*arguments: Any) -> Any:
        rows = one_pass(*arguments)
        if _take("torn"):
            raise RuntimeError("chaos: the trainer raises between two passes of a batch")
        return rows

    module._pass = torn  # type: ignore[attr-defined]


def _patch_engine(module: ModuleType) -> None:
    load = module.VllmBackend.load

    async def dying(self: Any, adapter: Any) -> None:
        await load(self, adapter)
        if _take("publish-kill"):
            os.kill(os.getpid(), signal.SIGKILL)

    module.VllmBackend.load = dying


_PATCHES: dict[str, Callable[[ModuleType], None]] = {
    "lorafleet_runtime.trainer.rank": _patch_trainer,
    "lorafleet_runtime.trainer.passes": _patch_passes,
    "lorafleet_runtime.engines.compat": _patch_engine,
}


class _Patcher:
    """A finder that patches the modules above right after they were executed."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None, target: ModuleType | None = None) -> Any:
        patch = _PATCHES.get(name)
        spec = None if patch is None else importlib.machinery.PathFinder.find_spec(name, path, target)
        if patch is None or spec is None or spec.loader is None:
            return None
        execute = spec.loader.exec_module

        def patched(module: ModuleType) -> None:
            execute(module)
            patch(module)

        spec.loader.exec_module = patched  # type: ignore[method-assign]
        return spec


def _digest(tensor: Any) -> str:
    return hashlib.sha256(tensor.detach().cpu().contiguous().numpy().tobytes()).hexdigest()


def _append(name: str, line: dict[str, Any]) -> None:
    with (Path(str(_FOLDER)) / name).open("a") as file:
        file.write(json.dumps(line) + "\n")


def _lines(name: str) -> set[str]:
    try:
        return set((Path(str(_FOLDER)) / name).read_text().split())
    except FileNotFoundError:
        return set()


def _take(name: str) -> bool:
    """Whether a fault was asked for; it happens once."""
    try:
        (Path(str(_FOLDER)) / name).unlink()
    except FileNotFoundError:
        return False
    return True


if _FOLDER is not None:
    sys.meta_path.insert(0, _Patcher)

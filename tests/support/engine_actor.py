"""One real engine for tests: vLLM on CPU in a Ray actor, on the tiny model, behind plain blocking calls.

The actor is a process of its own: vLLM must not share one with a test's torch work.
"""

import contextlib
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import ray

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.engines.actor import create_engine
from lorafleet_runtime.engines.settings import engine_config
from lorafleet_runtime.publish.base_model import read_base_model
from lorafleet_runtime.types import Completion, EngineStatus, SamplingParams, VersionId
from support.adapters import RandomAdapter, random_adapter
from support.tiny_model import make_tiny_model

MAX_LORAS = 4


class EngineUnderTest:
    """Blocking calls to one engine actor, and the model it serves."""

    def __init__(self, model: Path, actor: Any, shapes: dict[str, tuple[int, int]]) -> None:
        self.model = model
        self.actor = actor
        self.shapes = shapes
        self._count = 0

    def publish(self, uid: str, n: int, adapter: RandomAdapter) -> VersionId:
        version = VersionId(uid, "1.1", n)
        ray.get(self.actor.publish.remote(version, adapter.manifest, ray.put(adapter.buffer)))
        return version

    def ask(self, version: VersionId | None, prompt: Sequence[int], params: SamplingParams, name: str = "r") -> Any:
        """A reference to the completions."""
        self._count += 1
        return self.actor.generate.remote(f"{name}::{self._count}", version, list(prompt), params)

    def generate(self, version: VersionId | None, prompt: Sequence[int], params: SamplingParams) -> list[Completion]:
        return list(ray.get(self.ask(version, prompt, params)))

    def retire_everything(self) -> None:
        ray.get(self.actor.retire_all_except.remote([]))

    def status(self) -> EngineStatus:
        status: EngineStatus = ray.get(self.actor.list.remote())
        return status

    def adapter(self, seed: int, rank: int = 8, alpha: int = 16, modules: Sequence[str] = ()) -> RandomAdapter:
        """A random adapter on every projection of the model, or on those in `modules`."""
        shapes = {k: v for k, v in self.shapes.items() if not modules or k.rsplit(".", 1)[-1] in modules}
        return random_adapter(shapes, rank, seed, alpha)


@contextlib.contextmanager
def running_engine(env: dict[str, str] | None = None) -> Iterator[EngineUnderTest]:
    """One started engine, whose model would like to bend sampling; needs `local_ray`."""
    home = Path(tempfile.mkdtemp(prefix="lfe"))
    try:
        model = make_tiny_model(home / "model")
        file = model / "generation_config.json"
        bent = {"do_sample": True, "temperature": 0.6, "top_k": 20, "top_p": 0.8, "repetition_penalty": 1.1}
        file.write_text(json.dumps(json.loads(file.read_text()) | bent))
        spec = AdapterPoolSpec.model_validate({
            "baseModel": {"path": str(model), "dtype": "float32"},
            "slots": 2,
            "maxRank": 8,
            "engines": {
                "maxModelLen": 512, "maxNumSeqs": 64, "maxLoras": MAX_LORAS, "kvCacheBytes": 256 << 20, "numThreads": 1,
            },
            "storage": {"path": str(home / "storage")},
            "env": {"HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", **(env or {})},
        })  # fmt: skip
        actor = create_engine(spec, engine_config(spec, "engine-test", str(home / "stage")), local=True)
        ray.get(actor.start.remote())
        shapes = read_base_model(str(model), None, tuple(spec.target_modules)).linear_shapes
        yield EngineUnderTest(model, actor, shapes)
        with contextlib.suppress(ray.exceptions.RayActorError):
            ray.get(actor.shutdown.remote())
        ray.kill(actor)
    finally:
        shutil.rmtree(home, ignore_errors=True)

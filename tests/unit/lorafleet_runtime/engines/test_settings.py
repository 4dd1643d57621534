"""The config and the environment of an engine."""

import subprocess
import sys

import pytest

from lorafleet_api.v1alpha1.adapterpool import AdapterPoolSpec
from lorafleet_runtime.engines.actor import engine_options
from lorafleet_runtime.engines.settings import engine_config, environment, rank_cover
from lorafleet_runtime.errors import ConfigError


def _pool(**changes: object) -> AdapterPoolSpec:
    return AdapterPoolSpec.model_validate(
        {
            "baseModel": {"path": "/m", "dtype": "float32"},
            "storage": {"path": "/s"},
            "slots": 3,
            "maxRank": 12,
            **changes,
        }
    )


@pytest.mark.parametrize(("rank", "cover"), [(1, 1), (2, 8), (8, 8), (9, 16), (33, 64), (257, 320), (512, 512)])
def test_slots_get_the_smallest_rank_that_covers(rank: int, cover: int) -> None:
    assert rank_cover(rank) == cover


def test_a_rank_beyond_the_servers_is_refused() -> None:
    with pytest.raises(ConfigError, match="maxRank 513"):
        rank_cover(513)


def test_the_config_follows_the_pool() -> None:
    config = engine_config(_pool(defaults={"maxStaleness": 1}, targetModules=["q_proj"]), "e0", "/stage")
    assert (config.max_loras, config.max_rank, config.lora_rank) == (3 * 3 + 1, 12, 16)
    assert (config.target_modules, config.model, config.stage_root) == (("q_proj",), "/m", "/stage")


def test_threads_are_always_explicit_and_wait_passively() -> None:
    environ = environment(engine_config(_pool(engines={"numThreads": 2}), "e0"))
    assert (environ["OMP_NUM_THREADS"], environ["OMP_WAIT_POLICY"]) == ("2", "PASSIVE")
    assert int(environment(engine_config(_pool(), "e0"))["OMP_NUM_THREADS"]) >= 1


def test_the_pools_environment_wins() -> None:
    config = engine_config(_pool(env={"VLLM_LOGGING_LEVEL": "DEBUG"}), "e0")
    assert environment(config)["VLLM_LOGGING_LEVEL"] == "DEBUG"


def test_a_local_actor_asks_ray_for_nothing_and_a_cluster_actor_for_an_engine_node() -> None:
    assert "resources" not in engine_options(_pool(), "e0", local=True)
    options = engine_options(_pool(engines={"tensorParallel": 2}), "e0", local=False)
    assert (options["resources"], options["num_gpus"], options["num_cpus"]) == ({"lorafleet_engine": 1}, 2, 0)
    assert (options["lifetime"], options["name"]) == ("detached", "e0")


def test_requests_in_flight_never_fill_the_actor() -> None:
    options = engine_options(_pool(rollout={"maxInFlightGroups": 5000}), "e0", local=True)
    assert options["max_concurrency"] > 2 * 5000


def test_the_actor_module_imports_neither_torch_nor_vllm() -> None:
    code = (
        "import sys, lorafleet_runtime.engines.actor\n"
        "assert not {'torch', 'vllm'} & set(sys.modules), 'imported before the environment is set'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

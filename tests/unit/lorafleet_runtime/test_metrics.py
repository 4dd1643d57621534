"""What `/metrics` of the runtime tells of runs."""

from pathlib import Path

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lorafleet_runtime.http.app import create_app
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.types import PolicySums, StepResult
from support.fleets import World, build_world, running
from support.runs import activate, put


async def series(world: World, tmp_path: Path) -> dict[str, dict[str, float]]:
    """Values by run and by metric, as a scrape finds them."""
    view = FleetView(world.registry, world.fleet.signal, tmp_path)
    app = create_app(view, lambda: "secret", world.fleet.metrics.collectors)
    transport = httpx.ASGITransport(app=app)
    headers = {"Authorization": "Bearer secret"}
    async with httpx.AsyncClient(transport=transport, base_url="http://runtime", headers=headers) as client:
        answer = await client.get("/metrics")
    found: dict[str, dict[str, float]] = {}
    for family in text_string_to_metric_families(answer.raise_for_status().text):
        for sample in family.samples:
            if sample.name.startswith("lorafleet_run_"):
                assert sample.labels["pool"] == "pool"
                found.setdefault(sample.labels["name"], {})[sample.name.removeprefix("lorafleet_run_")] = sample.value
    return found


FIGURES = {"mismatch", "entropy", "kl_sampler", "kl_sampler_k1", "kl_base", "clip_fraction", "tis_fraction"}


async def test_a_training_runs_policy_statistics_are_scraped(tmp_path: Path) -> None:
    """support.fake_actors.POLICY has four tokens in every batch."""
    world = build_world(tmp_path)
    world.registry.sync([])
    async with running(world):
        put(world.registry, "a", numStep=1000)
        await world.until(lambda: world.registry.runs["a"].step >= 2)
        found = (await series(world, tmp_path))["run-a"]
    assert {name: found[name] for name in FIGURES} == pytest.approx(
        {
            "mismatch": 0.025, "entropy": 1.5, "kl_sampler": 0.1, "kl_sampler_k1": -0.05, "kl_base": 0.2,
            "clip_fraction": 0.25, "tis_fraction": 0.75,
        }
    )  # fmt: skip


async def test_figures_are_those_of_the_last_step_and_are_left_out_where_there_is_none(tmp_path: Path) -> None:
    world = build_world(tmp_path)
    activate(world.registry, "a")
    assert not FIGURES & (await series(world, tmp_path))["run-a"].keys()
    for groups, policy in ((1, PolicySums(tokens=2, entropy=3.0)), (1, PolicySums(tokens=4, entropy=6.0))):
        world.registry.commit("a", groups, [], policy)
    assert not FIGURES & (await series(world, tmp_path))["run-a"].keys()
    world.registry.stepped(StepResult("a", 1, 1e-3, 0.5), 1.0)
    found = (await series(world, tmp_path))["run-a"]
    assert found["entropy"] == 1.5
    assert "kl_base" not in found
    world.registry.commit("a", 2, [], PolicySums())
    world.registry.stepped(StepResult("a", 2, 1e-3, 0.5), 2.0)
    assert not FIGURES & (await series(world, tmp_path))["run-a"].keys()

"""Parts of the runtime die: every run goes on from its last step."""

from support.chaos import Scenario, gone

SERVE = "lorafleet_runtime.cli serve"
TRAINER = "ray::TrainerActor"
ENGINE = "ray::EngineActor"


def test_engine(scenario: Scenario) -> None:
    scenario.start()
    old = scenario.kill("engine actor", ENGINE)
    scenario.recover()
    assert gone(old)
    scenario.finish()
    assert scenario.row.restarts == 0


def test_engine_core(scenario: Scenario) -> None:
    scenario.start()
    actor = scenario.chaos.processes(ENGINE)
    scenario.kill("vLLM's own process", "VLLM::EngineCore")
    scenario.recover()
    assert gone(actor)
    scenario.finish()
    assert scenario.row.restarts == 0


def test_worker(scenario: Scenario) -> None:
    scenario.start()
    old = scenario.kill("rollout worker", "ray::RolloutActor")
    scenario.recover()
    assert gone(old)
    scenario.finish()
    assert scenario.row.restarts == 0


def test_reward_process(scenario: Scenario) -> None:
    scenario.start()
    victim = scenario.chaos.processes("lorafleet_runtime.rewards.child")[0]
    scenario.strike("a reward process", victim.kill)
    scenario.recover()
    scenario.finish()
    assert scenario.row.restarts == 0


def test_trainer(scenario: Scenario) -> None:
    scenario.start()
    old = scenario.kill("trainer actor", TRAINER)
    scenario.recover()
    assert gone(old)
    scenario.finish(undone=1)


def test_trainer_three_times(scenario: Scenario) -> None:
    scenario.start(numStep=24)
    for turn in (1, 2, 3):
        scenario.kill(f"trainer actor, {turn} times in one load", TRAINER)
        scenario.recover()
    scenario.finish(undone=3)


def test_runtime_process(scenario: Scenario) -> None:
    scenario.start()
    boot = scenario.cluster.listing().boot_epoch
    scenario.kill("runtime process", SERVE)
    scenario.recover()
    scenario.finish(undone=1)
    assert scenario.cluster.listing().boot_epoch == boot + 1


def test_head(scenario: Scenario) -> None:
    scenario.start()
    old = scenario.kill("head (supervisor of runtime and Ray)", "bin/lorafleet-runtime head")
    scenario.recover()
    assert gone(old)
    scenario.finish(undone=1)


def test_ray_control_store(scenario: Scenario) -> None:
    scenario.start()
    head = scenario.chaos.processes("bin/lorafleet-runtime head")
    old = [child for process in head for child in process.children(recursive=True)]
    scenario.kill("Ray's control store", "gcs_server")
    scenario.recover()
    assert gone(old)
    scenario.finish(undone=1)

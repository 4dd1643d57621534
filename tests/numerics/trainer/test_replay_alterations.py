"""`lorafleet replay` finds what was altered in a run's records and checkpoints, and names the step."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from torch import Tensor

from support.replay import digest, edit_json, recorded, run_replay, tamper


def altered_advantage(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["advantage"][0] *= 1.0001

    _tamper_step(directory, change)


def altered_signs(directory: Path) -> None:
    """Rewards, their mean and advantages agree, and the gradient is as long as before."""

    def change(t: dict[str, Tensor]) -> None:
        t["advantage"] *= -1
        t["reward"] *= -1

    _tamper_step(directory, change)
    about = directory / "records/step_00000002.json"
    edit_json(about, rewardMean=-json.loads(about.read_text())["rewardMean"])


def altered_token(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["token_ids"][0] ^= 1

    _tamper_step(directory, change)


def altered_prompt(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["prompt_ids"][3] ^= 1

    _tamper_step(directory, change)


def altered_sampler(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["sampler_logprobs"] += 0.05

    _tamper_step(directory, change)


def altered_rate(directory: Path) -> None:
    edit_json(directory / "records/step_00000002.json", lr=0.0100001)


def altered_weight(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        next(iter(t.values()))[0, 0] += 1e-6

    path = directory / "step_2"
    tamper(path / "adapter_model.safetensors", path / "state.json", change)


def altered_masters(directory: Path) -> None:
    """Adapter, masters and digests agree with each other: only a replay tells that the run did not come to them."""
    moved = 0.02

    def change_adapter(t: dict[str, Tensor]) -> None:
        t["base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight"][0, 0] += moved

    def change_masters(t: dict[str, Tensor]) -> None:
        t["master"][0] += moved

    path = directory / "step_2"
    tamper(path / "adapter_model.safetensors", path / "state.json", change_adapter)
    tamper(path / "optimizer.safetensors", path / "state.json", change_masters)


def altered_index(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["group_index"][0] = 900

    _tamper_step(directory, change)


def earlier_index(directory: Path) -> None:
    def change(t: dict[str, Tensor]) -> None:
        t["group_index"][0] = 1

    _tamper_step(directory, change)


def altered_figure(name: str, value: object) -> Callable[[Path], None]:
    """Of a record's JSON, which the digest does not cover."""

    def alter(directory: Path) -> None:
        edit_json(directory / "records/step_00000002.json", **{name: value})

    return alter


def other_data(directory: Path) -> None:
    run = directory / "step_2/state.json"
    identity = json.loads(run.read_text())["identity"]
    edit_json(run, identity=identity | {"data_digest": "other"})


def altered_config(directory: Path) -> None:
    path = directory / "step_2"
    old = digest(path / "adapter_config.json")
    edit_json(path / "adapter_config.json", lora_alpha=9)
    state = path / "state.json"
    state.write_text(state.read_text().replace(old, digest(path / "adapter_config.json")))


def lost_state(directory: Path) -> None:
    (directory / "step_2/state.json").unlink()


def _tamper_step(directory: Path, change: Callable[[dict[str, Tensor]], None]) -> None:
    path = directory / "records/step_00000002"
    tamper(path.with_suffix(".safetensors"), path.with_suffix(".json"), change)


@pytest.mark.parametrize(
    "alter, what",
    [
        (altered_advantage, "contradicts itself or run.json: the advantage of group 10, sample 0 is"),
        (altered_signs, "the adapter of its checkpoint differs"),
        (altered_token, "the log-probability of group 10, sample 0, token"),
        (altered_prompt, "the log-probability of group 10"),
        (altered_sampler, "the gradient norm"),
        (altered_rate, "the learning rate"),
        (altered_weight, "adapter_model.safetensors is not its master"),
        (altered_index, "group_index 900 is not among the groups that its cursor says are used up"),
        (earlier_index, "group_index 1 was used up before this step"),
        (altered_figure("groups", 3), "groups is 3, its arrays give 2"),
        (altered_figure("samples", 7), "samples is 7, its arrays give 6"),
        (altered_figure("tokens", 1), "tokens is 1, its arrays give 28"),
        (altered_figure("rewardMean", 0.99), "rewardMean is 0.99, its rewards give"),
        (altered_figure("denominator", 5), "denominator is 5, its samples give 6"),
        (altered_figure("versions", ["a@1.1.v1"]), "versions names 1 groups, its arrays hold 2"),
        (altered_figure("versions", ["b@1.1.v1"] * 2), "group 10 is of version 'b@1.1.v1', which is none of run a"),
        (altered_figure("versions", ["a@1.1.v3"] * 2), "'a@1.1.v3', which did not exist before step 2"),
        (altered_figure("versions", ["a@9.9.v1"] * 2), "'a@9.9.v1', which did not exist before step 2"),
        (altered_figure("incarnation", "1.0"), "incarnation is 1.0, the step before was made in the later 1.1"),
        (altered_figure("cursor", {"low": 0, "consumed": [10, 11]}), "its cursor lacks groups"),
        (altered_figure("cursor", {"low": 12, "consumed": [11]}), "which must rise above low"),
        (altered_figure("cursor", {}), "is damaged ('low')"),
        (other_data, "data_digest of state.json is other, the run's is"),
        (altered_config, "lora_alpha of adapter_config.json is 9, the run's is 8"),
        (lost_state, "its checkpoint: checkpoint: "),
        (altered_masters, "layers.0.self_attn.q_proj.lora_A.weight of its checkpoint is off"),
    ],
)
def test_alteration_is_found_at_its_step(qwen3: Path, tmp_path: Path, alter: Callable[[Path], None], what: str) -> None:
    directory = recorded(qwen3, tmp_path, saves=(1, 2, 3))
    alter(directory)
    code, output = run_replay(directory, qwen3)
    assert code == 1
    assert re.search(rf"\nstep 2: .*{re.escape(what)}", output), output


@pytest.mark.parametrize(
    "field, value, what",
    [
        ("rolloutBatchSize", 3, "it holds 2 groups, rolloutBatchSize is 3"),
        ("nSamplesPerPrompt", 4, "group 0 (place 0) holds 3 samples, nSamplesPerPrompt is 4"),
    ],
)
def test_step_of_another_size_is_no_step_of_the_run(
    qwen3: Path, tmp_path: Path, field: str, value: int, what: str
) -> None:
    directory = recorded(qwen3, tmp_path, steps=1, saves=(1,))
    edit_json(directory / "records/run.json", **{field: value})
    code, output = run_replay(directory, qwen3)
    assert code == 1
    assert re.search(rf"\nstep 1: .*{re.escape(what)}", output), output

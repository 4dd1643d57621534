"""The installed commands `lorafleet` and `kubectl lorafleet` against the real stack, as a user runs them."""

import json
import os
import subprocess
import sys
from pathlib import Path

from peft import PeftConfig
from peft.utils import load_peft_weights

from support.cluster import Cluster

_BIN = Path(sys.executable).parent


Done = subprocess.CompletedProcess[str]


def lorafleet(cluster: Cluster, *arguments: str, code: int = 0, timeout: float = 60.0) -> Done:
    """Run `lorafleet` against the stack; it must exit with `code`."""
    return _run([str(_BIN / "lorafleet"), *arguments, "--kubeconfig", str(cluster.stack.kubeconfig)], code, timeout)


def _run(command: list[str], code: int, timeout: float) -> Done:
    env = {**os.environ, "PATH": f"{_BIN}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, env=env, check=False)
    assert done.returncode == code, f"{command}: {done.returncode}\n{done.stdout}\n{done.stderr}"
    return done


def test_a_runs_whole_story_from_the_command_line(cluster: Cluster, tmp_path: Path) -> None:
    cluster.apply("story", numStep=4, customRmPath="support.rewards.slow")  # slow: there is something to watch
    watched = lorafleet(cluster, "watch", "story", timeout=120).stdout.splitlines()
    assert watched[-1].startswith("story  Completed  step 4/4")
    assert any("  Training  " in line for line in watched)

    shown = lorafleet(cluster, "status").stdout.splitlines()
    assert shown[0].startswith("Pool demo  Ready  slots ")
    assert any(line.split()[:2] == ["story", "Completed"] for line in shown)

    full = lorafleet(cluster, "status", "story").stdout
    assert cluster.get("story")["status"]["artifact"]["path"] in full

    readable = lorafleet(cluster, "samples", "story", "--step", "1").stdout
    assert "Prompt 0, sampled by version 1:\n    0 plus\n" in readable
    written = json.loads(lorafleet(cluster, "samples", "story", "--step", "1", "--json").stdout)
    assert (written["step"], written["groups"], written["samples"]) == (1, 2, 8)
    assert [prompt["prompt"] for prompt in written["prompts"]] == ["0 plus", "1 plus"]
    status = cluster.get("story")["status"]
    last = json.loads(lorafleet(cluster, "samples", "story", "--json").stdout)
    rewards = [sample["reward"] for prompt in last["prompts"] for sample in prompt["samples"]]
    assert last["step"] == 4
    assert abs(sum(rewards) / len(rewards) - status["rewardMean"]) < 1e-3

    adapter = tmp_path / "adapter"
    lorafleet(cluster, "download", "story", "-o", str(adapter))
    assert PeftConfig.from_pretrained(str(adapter)).r == 4
    weights = load_peft_weights(str(adapter))
    assert any("lora_B" in name and tensor.abs().max() > 0 for name, tensor in weights.items())

    text = lorafleet(cluster, "logs", "story").stdout
    order = [
        "data and reward are usable: 64 prompts", "loaded afresh into slot", "version 1 is on every engine",
        "step 1 of 4  reward", "step 4 of 4  reward", "checkpoint of step 4 written", "its slot is free",
    ]  # fmt: skip
    places = [text.find(part) for part in order]
    assert places == sorted(places) and places[0] >= 0, text


def test_a_failed_reward_shows_its_traceback(cluster: Cluster) -> None:
    cluster.apply("broken", customRmPath="support.rewards.broken")
    watched = lorafleet(cluster, "watch", "broken", code=1, timeout=120).stdout
    assert watched.count("this reward is broken") == 1
    text = lorafleet(cluster, "logs", "broken").stdout
    assert "Traceback (most recent call last)" in text
    assert "rewards.py" in text


def test_the_kubectl_plugin_is_the_same(cluster: Cluster) -> None:
    cluster.apply("plugged", numStep=1)
    config = str(cluster.stack.kubeconfig)
    command = [str(_BIN / "kubectl"), "lorafleet", "status", "plugged", "--kubeconfig", config]
    assert "default/plugged" in _run(command, 0, 60.0).stdout


def test_an_unknown_run_is_one_line(cluster: Cluster) -> None:
    done = lorafleet(cluster, "status", "nobody", code=1)
    assert done.stderr.startswith("error: run: nobody: there is no such AdapterRun in namespace default; ")
    assert len(done.stderr.strip().splitlines()) == 1

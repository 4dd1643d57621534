"""`lorafleet convert`: miles' adapter.yaml to an AdapterRun."""

from pathlib import Path

import pytest
import yaml
from typer.testing import CliRunner, Result

from lorafleet_api.v1alpha1.adapterrun import AdapterRunSpec
from lorafleet_cli.main import app

MILES = """
data: /data/gsm8k.parquet
rank: 16
alpha: 32
rollout_batch_size: 32
n_samples_per_prompt: 4
save: /ckpt/gsm8k
input_key: messages
label_key: label
rm_type: math
num_step: 400
metadata: {style_hint: short}
lora_dropout: 0.1
"""


def convert(path: Path, text: str, *more: str) -> Result:
    path.write_text(text)
    return CliRunner().invoke(app, ["convert", str(path), *more])


def test_every_key_is_taken_over_or_named(tmp_path: Path) -> None:
    result = convert(tmp_path / "GSM8k_run.yaml", MILES, "--pool", "qwen")
    assert result.exit_code == 0
    made = yaml.safe_load(result.stdout)
    assert (made["apiVersion"], made["kind"]) == ("lorafleet.dev/v1alpha1", "AdapterRun")
    assert made["metadata"]["name"] == "gsm8k-run"
    assert made["spec"] == {
        "poolRef": {"name": "qwen"}, "data": "/data/gsm8k.parquet", "rank": 16, "alpha": 32, "rolloutBatchSize": 32,
        "nSamplesPerPrompt": 4, "inputKey": "messages", "labelKey": "label", "rmType": "math", "numStep": 400,
        "sampleMetadata": {"style_hint": "short"},
    }  # fmt: skip
    AdapterRunSpec.model_validate(made["spec"])
    warned = [line.split(":")[1].strip() for line in result.stderr.splitlines()]
    assert warned == ["save", "lora_dropout", "name"]


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("- a list", "file"),
        ("data: [", "file"),
        ("rm_type: math", "data"),
        ("data: x.jsonl\nrm_type: math\ncustom_rm_path: a.b", "rm_type, custom_rm_path"),
        ("data: x.jsonl\nrank: -4", "rank"),
        ("data: x.jsonl\nrm_type: math\nrank: -4", "rank"),
        ("data: x.jsonl\nrm_type: math\nnum_step: 0", "numStep"),
    ],
)
def test_an_unusable_file_is_told_in_one_line(tmp_path: Path, text: str, field: str) -> None:
    result = convert(tmp_path / "x.yaml", text)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert result.stderr.startswith(f"error: {field}: ")
    assert len(result.stderr.strip().splitlines()) == 1


def test_num_step_wins_over_num_epoch_as_in_miles(tmp_path: Path) -> None:
    result = convert(tmp_path / "x.yaml", "data: x.jsonl\nrm_type: math\nnum_step: 3\nnum_epoch: 2")
    assert "numEpoch" not in yaml.safe_load(result.stdout)["spec"]
    assert "num_epoch: not taken over: num_step wins" in result.stderr


def test_a_reward_and_a_length_may_come_from_the_pool(tmp_path: Path) -> None:
    result = convert(tmp_path / "x.yaml", "data: x.jsonl")
    assert result.exit_code == 0
    assert yaml.safe_load(result.stdout)["spec"] == {"poolRef": {"name": "demo"}, "data": "x.jsonl"}
    reward, length = result.stderr.splitlines()
    assert reward.startswith("warning: rm_type: missing: unless the pool's defaults set a reward")
    assert length.startswith("warning: num_step: missing: ") and "ends after 1 epoch" in length


@pytest.mark.parametrize("length", ["num_step: 3", "num_epoch: 2"])
def test_a_length_is_not_warned_of(tmp_path: Path, length: str) -> None:
    assert convert(tmp_path / "x.yaml", f"data: x.jsonl\nrm_type: math\n{length}").stderr == ""


@pytest.mark.parametrize(
    ("given", "made"),
    [
        ("a..b", "a.b"),
        ("run_.v2", "run.v2"),
        ("-x.-y-.z", "x.y.z"),
        ("a" * 252 + ".b", "a" * 252),
        ("a" * 252 + "-b", "a" * 252),
        ("___", "run"),
        ("fine-1.v2", "fine-1.v2"),
    ],
)
def test_a_name_becomes_one_that_kubernetes_takes(tmp_path: Path, given: str, made: str) -> None:
    result = convert(tmp_path / "x.yaml", "data: x.jsonl\nrm_type: math\nnum_step: 1", "--name", given)
    assert yaml.safe_load(result.stdout)["metadata"]["name"] == made
    assert result.stderr == ("" if made == given else f"warning: name: {given}: no Kubernetes name, so it is {made}\n")


@pytest.mark.parametrize(
    ("line", "advice"),
    [
        ("lr: 1.0e-5", "write it under optimizer"),
        ("kl_coef: 0.1", "write it under algorithm"),
        ("rollout_max_response_len: 64", "write it as max_tokens under sampling"),
        ("weather: fine", "an AdapterRun has no such field"),
    ],
)
def test_a_key_that_stands_at_the_wrong_place_is_told_where_it_belongs(tmp_path: Path, line: str, advice: str) -> None:
    result = convert(tmp_path / "x.yaml", f"data: x.jsonl\nrm_type: math\nnum_step: 1\n{line}")
    assert result.stderr.rstrip().endswith(f"not taken over: {advice}")

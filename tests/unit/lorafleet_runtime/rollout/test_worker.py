"""The rollout worker with a scripted engine: groups, failure policies, opening and closing."""

import asyncio
import json
import math
import os
import pickle
import textwrap
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import pytest_asyncio
from safetensors.numpy import save_file

from lorafleet_api.v1alpha1.reasons import DATA_ERROR, INIT_ERROR, INVALID_SPEC, NON_FINITE, REWARD_ERROR
from lorafleet_runtime.errors import Retryable, RunError
from lorafleet_runtime.rewards.process import RewardProcess
from lorafleet_runtime.rollout.worker import RolloutWorker
from lorafleet_runtime.storage import CHECKPOINT_FILES
from lorafleet_runtime.types import Completion, DroppedGroup, PromptGroup, SamplingParams, VersionId
from support.tiny_model import EOS_ID, make_tokenizer

VERSION = VersionId("uid-1", "7.2", 3)
MODULE = """
    import os

    def by_text(*, response, truncated, **call):
        if response == "raise":
            raise ValueError("no verdict")
        if response == "half":
            raise ValueError("half \\ud800")
        if response == "wait":
            pid, gate = os.environ["REWARD_PID"], os.environ["REWARD_GATE"]
            with open(pid, "w") as file:
                file.write(str(os.getpid()))
            open(gate).close()
            return 1.0
        return 0.0 if truncated else float(response)

    def seen(*, prompt, response, label, metadata, truncated):
        assert (prompt, response, label, metadata) == ("2 +", " 3", "5", {"level": 1}), (prompt, response, label)
        return 1.0
"""


@dataclass
class ScriptedEngine:
    """Answers every request with the given replies; "..." at the end of one means that it was cut off."""

    replies: Sequence[str]
    requests: list[tuple[str, VersionId | None, tuple[int, ...], SamplingParams]] = field(default_factory=list)

    async def generate(
        self, request_id: str, version: VersionId | None, prompt_ids: Sequence[int], params: SamplingParams
    ) -> list[Completion]:
        self.requests.append((request_id, version, tuple(prompt_ids), params))
        return [completion(reply) for reply in self.replies]


def completion(reply: str) -> Completion:
    cut = reply.endswith("...")
    ids = make_tokenizer().encode(reply.removesuffix("...")) + ([] if cut else [EOS_ID])
    reason: Literal["stop", "length"] = "length" if cut else "stop"
    return Completion(tuple(ids), tuple(-0.5 - i for i in range(len(ids))), reason)


def spec(**fields: Any) -> dict[str, Any]:
    base: dict[str, Any] = {
        "poolRef": {"name": "p"},
        "data": "d.jsonl",
        "labelKey": "label",
        "customRmPath": "worker_rewards.by_text",
        "nSamplesPerPrompt": 4,
        "sampling": {"maxTokens": 16, "temperature": 0.0, "stop": ["\n\n"]},
        "algorithm": {"stdNorm": False},
    }
    return base | fields


@pytest_asyncio.fixture
async def worker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[RolloutWorker]:
    model, storage = tmp_path / "model", tmp_path / "storage"
    make_tokenizer().save_pretrained(model)
    storage.mkdir()
    rows = [{"text": "2 +", "label": "5", "meta": {"level": 1}}, {"text": "x" * 600, "label": "0"}]
    (storage / "d.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "worker_rewards.py").write_text(textwrap.dedent(MODULE))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    pool = {"baseModel": {"path": str(model)}, "engines": {"maxModelLen": 512}, "rewardModules": ["worker_rewards"]}
    made = RolloutWorker(pool, model, storage)
    yield made
    await made.shutdown()


async def group(worker: RolloutWorker, engine: ScriptedEngine, index: int = 0) -> PromptGroup:
    got = await worker.run_group("uid-1", index, VERSION, engine)
    assert isinstance(got, PromptGroup)
    return got


async def test_a_group_carries_what_the_engine_sampled_and_its_advantages(worker: RolloutWorker) -> None:
    info = await worker.open("uid-1", spec())
    assert (info.rows, info.skipped) == (1, 1)
    got = await group(worker, ScriptedEngine(["1", "0", "0", "5..."]), index=9)
    assert (got.uid, got.version, got.index) == ("uid-1", VERSION, 9)
    assert got.texts == ("1", "0", "0", "5") and got.prompt_ids == tuple(make_tokenizer().encode("2 +"))
    assert [s.reward for s in got.samples] == [1.0, 0.0, 0.0, 0.0]
    assert [s.advantage for s in got.samples] == [0.75, -0.25, -0.25, -0.25]
    assert [s.truncated for s in got.samples] == [False, False, False, True]
    assert got.samples[0].token_ids[-1] == EOS_ID and got.samples[0].sampler_logprobs == (-0.5, -1.5)


async def test_the_engine_gets_the_runs_sampling_and_no_seed(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec())
    engine = ScriptedEngine(["1"] * 4)
    await group(worker, engine)
    await group(worker, engine)
    (first, version, prompt_ids, params), (second, *_) = engine.requests
    assert params == SamplingParams(4, 0.0, 1.0, 16, ("\n\n",), None)
    assert version == VERSION and prompt_ids == tuple(make_tokenizer().encode("2 +"))
    assert first.startswith("uid-1::7.2::v3::0-") and first != second


async def test_the_reward_sees_the_row_and_the_text_without_its_end(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec(customRmPath="worker_rewards.seen", metadataKey="meta"))
    got = await group(worker, ScriptedEngine([" 3"] * 4))
    assert [s.reward for s in got.samples] == [1.0] * 4 and got.is_constant


async def test_the_math_reward_scores_one_group(worker: RolloutWorker) -> None:
    """Case 1 (marin-community/marin#9163): 0, 0, 1, 0; the group's mean is 0.25, so its rewards are not all equal."""
    await worker.open("uid-1", spec(customRmPath=None, rmType="math"))
    replies = [r"Try \boxed{5}. No: \boxed{", r"Try \boxed{5}. \boxed{}", r"It is \boxed{5}.", r"\boxed{5}, \boxed{1"]
    got = await group(worker, ScriptedEngine(replies))
    assert [s.reward for s in got.samples] == [0.0, 0.0, 1.0, 0.0] and not got.is_constant


async def test_gsm8k_as_it_is_scores_a_right_answer(worker: RolloutWorker, tmp_path: Path) -> None:
    """Case 2 (verl-project/verl#758), (b): the raw parquet file, its answer column the label."""
    row = {"question": "A crate holds 25 jars. How many in 50 crates?", "answer": "25*50=1250\n#### 1,250"}
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([row]), tmp_path / "storage/gsm8k.parquet")
    fields = {"data": "gsm8k.parquet", "inputKey": "question", "labelKey": "answer"}
    await worker.open("uid-1", spec(customRmPath=None, rmType="math", **fields))
    got = await group(worker, ScriptedEngine(["#### 1250", "#### 125", "1,250 jars", "#### 1,250"]))
    assert [s.reward for s in got.samples] == [1.0, 0.0, 1.0, 1.0]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
async def test_a_diverged_policy_is_told_with_its_settings_before_the_reward_sees_it(
    worker: RolloutWorker, value: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    await worker.open(
        "uid-1", spec(optimizer={"lr": 0.5, "weightDecay": 1.5, "clipGrad": 0}, rewardFailurePolicy="Fail")
    )
    good = completion("1")
    sick = Completion(completion("raise").token_ids, (-0.5, value), "stop")

    async def generate(*_: object) -> list[Completion]:
        return [good, good, sick, good]

    engine = ScriptedEngine([])
    monkeypatch.setattr(engine, "generate", generate)
    with pytest.raises(RunError) as caught:
        await group(worker, engine)
    assert caught.value.reason == NON_FINITE
    assert caught.value.message == (
        "its policy has diverged: log-probabilities of its version 3 are not finite, with optimizer.lr 0.5 and "
        "weightDecay 1.5; lower optimizer.lr, or set clipGrad, which is 0"
    )


async def test_a_rewards_failure_is_told_in_words_that_every_answer_can_carry(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec())
    with pytest.raises(RunError) as caught:
        await group(worker, ScriptedEngine(["1", "half", "1", "1"]))
    assert "ValueError: half ?" in caught.value.message
    (caught.value.message + caught.value.detail).encode()


async def test_an_over_long_row_is_skipped_and_a_neighbour_goes_on(worker: RolloutWorker, tmp_path: Path) -> None:
    """Case 9 (huggingface/trl#3180): the row in the middle, and a file of nothing else."""
    long = {"text": "count: " + "tick " * 9000, "label": "0"}
    rows = [{"text": "count: 1", "label": "1"}, long, {"text": "count: 2", "label": "2"}]
    for name, content in (("some", rows), ("all", [long] * 3)):
        (tmp_path / f"storage/{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in content))
    await worker.open("uid-1", spec())
    info = await worker.open("some", spec(data="some.jsonl"))
    assert (info.rows, info.skipped) == (2, 1)
    prompts = [tuple(make_tokenizer().encode(f"count: {n}")) for n in (1, 2, 1)]
    got = [await worker.run_group("some", index, VERSION, ScriptedEngine(["1"] * 4)) for index in range(3)]
    assert [g.prompt_ids for g in got if isinstance(g, PromptGroup)] == prompts
    with pytest.raises(RunError, match="0 usable rows: all 3 prompts are longer than 496 tokens"):
        await worker.open("all", spec(data="all.jsonl"))
    assert [s.reward for s in (await group(worker, ScriptedEngine(["1"] * 4))).samples] == [1.0] * 4


async def test_policy_fail_fails_the_run_with_the_exception(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec())
    with pytest.raises(RunError) as caught:
        await group(worker, ScriptedEngine(["1", "raise", "1", "1"]))
    assert caught.value.reason == REWARD_ERROR
    assert "customRmPath: 'worker_rewards.by_text'" in caught.value.message
    assert "ValueError: no verdict" in caught.value.message


async def test_policy_zero_scores_zero(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec(rewardFailurePolicy="Zero"))
    got = await group(worker, ScriptedEngine(["1", "raise", "nan", "1"]))
    assert [s.reward for s in got.samples] == [1.0, 0.0, 0.0, 1.0]


async def test_policy_drop_drops_the_group(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec(rewardFailurePolicy="Drop"))
    got = await worker.run_group("uid-1", 4, VERSION, ScriptedEngine(["1", "raise", "1", "1"]))
    assert got == DroppedGroup("uid-1", VERSION, 4, "rewardError", "ValueError: no verdict")


@pytest.mark.parametrize("replies", [["1"] * 3, ["1", "1", "1", "..."]])
async def test_an_incomplete_answer_is_an_aborted_group(worker: RolloutWorker, replies: list[str]) -> None:
    await worker.open("uid-1", spec())
    got = await worker.run_group("uid-1", 0, VERSION, ScriptedEngine(replies))
    assert got == DroppedGroup("uid-1", VERSION, 0, "aborted", "3 of 4 completions came back")


async def test_the_engines_errors_come_through(worker: RolloutWorker) -> None:
    class Away(ScriptedEngine):
        async def generate(self, *call: Any) -> list[Completion]:
            raise Retryable("engine-0 is restarting")

    await worker.open("uid-1", spec())
    with pytest.raises(Retryable, match="engine-0"):
        await worker.run_group("uid-1", 0, VERSION, Away([]))


async def test_a_run_that_is_not_open_is_to_be_opened_again(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec())
    await worker.close("uid-1")
    with pytest.raises(Retryable, match="open it again"):
        await worker.run_group("uid-1", 0, VERSION, ScriptedEngine([]))


async def test_open_is_idempotent_and_a_new_spec_replaces_the_old(worker: RolloutWorker) -> None:
    first = await worker.open("uid-1", spec())
    assert await worker.open("uid-1", spec()) is first
    await worker.open("uid-1", spec(rewardFailurePolicy="Zero"))
    assert (await group(worker, ScriptedEngine(["raise"] * 4))).is_constant


async def test_concurrent_opens_start_one_reward(worker: RolloutWorker, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[RewardProcess] = []
    start = RewardProcess.start

    async def counted(self: RewardProcess) -> None:
        started.append(self)
        await start(self)

    monkeypatch.setattr(RewardProcess, "start", counted)

    async def open_and_ask() -> PromptGroup:
        await worker.open("uid-1", spec())
        return await group(worker, ScriptedEngine(["1", "0", "1", "0"]))

    groups = await asyncio.gather(*(open_and_ask() for _ in range(4)))
    assert len(started) == 1
    assert [[s.reward for s in g.samples] for g in groups] == [[1.0, 0.0, 1.0, 0.0]] * 4


@pytest.fixture
def gate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """Fifos of a reward that is told to wait: it writes its process id to the one and waits for an end of the other."""
    for name in ("pid", "gate"):
        os.mkfifo(tmp_path / name)
    monkeypatch.setenv("REWARD_PID", str(tmp_path / "pid"))
    monkeypatch.setenv("REWARD_GATE", str(tmp_path / "gate"))
    return tmp_path / "pid", tmp_path / "gate"


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


async def test_a_replaced_reward_ends_with_its_last_scorer(worker: RolloutWorker, gate: tuple[Path, Path]) -> None:
    await worker.open("uid-1", spec())
    old = worker._runs["uid-1"].reward.pid
    asking = asyncio.create_task(group(worker, ScriptedEngine(["wait", "1", "0", "1"])))
    assert old is not None and int(await asyncio.to_thread(gate[0].read_text)) == old
    await worker.open("uid-1", spec(rewardTimeoutSeconds=9))
    assert is_alive(old)
    (await asyncio.to_thread(gate[1].open, "w")).close()
    assert [s.reward for s in (await asking).samples] == [1.0, 1.0, 0.0, 1.0]
    assert not is_alive(old)
    assert worker._runs["uid-1"].reward.pid not in (None, old)


async def test_a_group_of_a_run_that_closes_is_retryable_and_starts_no_reward(
    worker: RolloutWorker, gate: tuple[Path, Path]
) -> None:
    await worker.open("uid-1", spec())
    reward = worker._runs["uid-1"].reward
    asking = [asyncio.create_task(group(worker, ScriptedEngine(["wait", "1", "0", "1"]))) for _ in range(2)]
    await asyncio.to_thread(gate[0].read_text)
    await worker.close("uid-1")
    for result in await asyncio.gather(*asking, return_exceptions=True):
        assert isinstance(result, Retryable) and "closed" in str(result)
    assert reward.pid is None


def write_adapter(root: Path, rank: int = 4, **config: Any) -> None:
    """A PEFT directory `start` for a model of one layer."""
    sizes = {"num_hidden_layers": 1, "hidden_size": 8, "intermediate_size": 8, "num_attention_heads": 1}
    limits = {"vocab_size": 512, "max_position_embeddings": 512, "rms_norm_eps": 1e-6}
    (root / "model/config.json").write_text(json.dumps({"model_type": "llama", **sizes, **limits}))
    start = root / "storage/start"
    start.mkdir()
    plain = {"peft_type": "LORA", "r": rank, "lora_alpha": rank}
    (start / "adapter_config.json").write_text(json.dumps(plain | config))
    module = "base_model.model.model.layers.0.self_attn.q_proj"
    a, b = np.ones((rank, 8), np.float32), np.ones((8, rank), np.float32)
    save_file({f"{module}.lora_A.weight": a, f"{module}.lora_B.weight": b}, start / "adapter_model.safetensors")


START = {"initFrom": "start", "rank": 4, "targetModules": ["q_proj"]}


@pytest.mark.parametrize(
    ("rank", "config", "text"), [(16, {}, "r is 16"), (4, {"rank_pattern": {"q_proj": 16}}, "rank_pattern")]
)
async def test_an_adapter_that_does_not_fit_is_refused_when_the_run_is_opened(
    worker: RolloutWorker, tmp_path: Path, rank: int, config: dict[str, Any], text: str
) -> None:
    write_adapter(tmp_path, rank, **config)
    with pytest.raises(RunError, match=text) as caught:
        await worker.open("uid-1", spec(**START))
    assert caught.value.reason == INIT_ERROR


async def test_a_truncated_adapter_is_refused_unless_the_run_resumes(worker: RolloutWorker, tmp_path: Path) -> None:
    write_adapter(tmp_path)
    await worker.open("uid-1", spec(**START))
    await worker.close("uid-1")
    file = tmp_path / "storage/start/adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(RunError, match="cannot be read") as caught:
        await worker.open("uid-1", spec(**START))
    assert caught.value.reason == INIT_ERROR

    own = tmp_path / "storage/team/run/uid-1/step_3"
    own.mkdir(parents=True)
    names = CHECKPOINT_FILES - {"state.json"}
    for name in names:
        (own / name).write_text("x")
    (own / "state.json").write_text(json.dumps({"files": {name: {"bytes": 1} for name in names}}))
    assert (await worker.open("uid-1", spec(**START))).rows == 1


@pytest.mark.parametrize(
    ("fields", "reason", "text"),
    [
        ({"data": "none.jsonl"}, DATA_ERROR, "data: 'none.jsonl' does not exist"),
        (
            {"customRmPath": "worker_rewards.none"},
            REWARD_ERROR,
            "'worker_rewards.none' cannot be loaded: AttributeError",
        ),
        ({"customRmPath": "os.getcwd"}, INVALID_SPEC, "rewardModules allow worker_rewards"),
    ],
)
async def test_what_cannot_be_opened_is_the_runs_error(
    worker: RolloutWorker, fields: dict[str, Any], reason: str, text: str
) -> None:
    with pytest.raises(RunError) as caught:
        await worker.open("uid-1", spec(**fields))
    assert caught.value.reason == reason and text in caught.value.message


async def test_a_group_shows_its_prompt_as_the_model_read_it(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec())
    assert (await group(worker, ScriptedEngine(["1", "0", "0", "1"]))).prompt == "2 +"


async def test_a_reward_that_raises_brings_its_traceback_through_the_actors_border(worker: RolloutWorker) -> None:
    await worker.open("uid-1", spec())
    with pytest.raises(RunError) as caught:
        await worker.run_group("uid-1", 0, VERSION, ScriptedEngine(["1", "raise", "0", "1"]))
    error = pickle.loads(pickle.dumps(caught.value))
    assert "worker_rewards.py" in error.fault("uid-1").detail
    assert error.fault("uid-1").detail.rstrip().endswith("ValueError: no verdict")

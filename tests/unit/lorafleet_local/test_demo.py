"""The demo fails loudly: on a failed run, a dead process, a wrong manifest, a second demo."""

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import yaml

from lorafleet_local import demo, demo_base, demo_full, pool, stack
from lorafleet_local.demo import DemoError, run_demo
from lorafleet_local.demo_base import Watch, examples
from lorafleet_local.measure import Results
from lorafleet_local.processes import Process
from lorafleet_local.report import Reporter
from lorafleet_local.tasks import TASKS


def run(**conditions: str) -> dict[str, Any]:
    found = [
        {"type": kind, "status": status, "reason": "DataError", "message": "data: x.jsonl is missing"}
        for kind, status in conditions.items()
    ]
    return {"metadata": {"name": "addition"}, "status": {"conditions": found}}


class FakeApi:
    """Answers with the given lists; raises for None, and at their end."""

    def __init__(self, *answers: list[dict[str, Any]] | None) -> None:
        self.answers = list(answers)

    def list(self, kind: str, namespace: str) -> list[dict[str, Any]]:
        answer = self.answers.pop(0) if self.answers else None
        if answer is None:
            raise httpx.ConnectError("refused")
        return answer


def watch(api: FakeApi, tmp_path: Path, *processes: Process, may_fail: frozenset[str] = frozenset()) -> Watch:
    running: Any = SimpleNamespace(state=SimpleNamespace(processes=list(processes), folder=tmp_path))
    return Watch(running, api, Reporter(), Results(), may_fail)  # type: ignore[arg-type]


def test_a_failed_run_ends_the_demo_with_its_reason(tmp_path: Path) -> None:
    with pytest.raises(DemoError, match=r"addition failed: DataError: data: x\.jsonl is missing"):
        watch(FakeApi([run(Failed="True")]), tmp_path).poll()


def test_a_run_that_may_fail_does_not_end_it(tmp_path: Path) -> None:
    found = watch(FakeApi([run(Failed="True")]), tmp_path, may_fail=frozenset({"addition"})).poll()
    assert found is not None and len(found) == 1


def test_a_dead_process_ends_the_demo_with_its_log(tmp_path: Path) -> None:
    (tmp_path / "etcd.log").write_text("disk full\n")
    dead = Process("etcd", 2**22 - 1, 1, str(tmp_path / "etcd.log"))
    with pytest.raises(DemoError, match="etcd ended\n  disk full"):
        watch(FakeApi([]), tmp_path, dead).poll()


def test_a_short_absence_of_the_api_server_is_waited_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watching = watch(FakeApi([run(Registered="True")]), tmp_path)
    found = watching.poll()
    assert found is not None and len(found) == 1
    assert watching.poll() is None
    monkeypatch.setattr(demo_base, "_API_PATIENCE_SECONDS", -1.0)
    with pytest.raises(DemoError, match="API server does not answer: refused"):
        watching.poll()


def write_examples(root: Path, pool_name: str) -> None:
    folder = root / "manifests" / "examples"
    folder.mkdir(parents=True)
    for task in TASKS:
        document = {"metadata": {"name": f"run-{task}"}, "spec": {"poolRef": {"name": pool_name}}}
        (folder / f"{task}.yaml").write_text(yaml.safe_dump(document))


def test_examples_are_found_per_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples(tmp_path, pool.POOL_NAME)
    monkeypatch.setattr(demo_base, "repo_root", lambda: tmp_path)
    assert [(example.name, example.task) for example in examples()] == [(f"run-{task}", task) for task in TASKS]


def test_an_example_for_another_pool_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_examples(tmp_path, "elsewhere")
    monkeypatch.setattr(demo_base, "repo_root", lambda: tmp_path)
    with pytest.raises(DemoError, match=r"spec\.poolRef\.name: 'elsewhere'"):
        examples()


def test_a_second_demo_is_refused_and_leaves_the_first_alone(tmp_path: Path) -> None:
    folder = tmp_path / "demo"
    with demo_base._only_one(folder):
        (folder / "state.json").write_text("{}")
        with pytest.raises(DemoError, match="another demo is running"):
            run_demo(folder, None)
        assert (folder / "state.json").read_text() == "{}"


def test_whatever_fails_the_stack_goes_down(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    downs: list[Path] = []
    monkeypatch.setattr(stack, "down", lambda folder, reporter: downs.append(folder))

    def up(folder: Path, reporter: Reporter, owner: Process) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(stack, "up", up)
    with pytest.raises(KeyboardInterrupt):
        run_demo(tmp_path / "demo", None)
    assert downs == [tmp_path / "demo"] * 2  # before, against leftovers, and after


def test_an_absence_of_the_api_server_is_no_deletion(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_base, "_POLL_SECONDS", 0.0)
    api = FakeApi([run(Registered="True")], None, None, [run(Registered="True")])
    seen: list[list[dict[str, Any]]] = []
    watch(api, tmp_path).follow(lambda: len(api.answers) < 3, seen.append)
    assert [len(items) for items in seen] == [1, 1], "two polls without an answer show nothing"


def test_the_last_reading_waits_for_the_api_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo_base, "_POLL_SECONDS", 0.0)
    assert demo_base.list_runs(FakeApi(None, [run()])).keys() == {"addition"}  # type: ignore[arg-type]
    monkeypatch.setattr(demo_base, "_API_PATIENCE_SECONDS", 0.0)
    with pytest.raises(DemoError, match="API server does not answer: refused"):
        demo_base.list_runs(FakeApi())  # type: ignore[arg-type]


@pytest.mark.parametrize("proven", [True, False])
@pytest.mark.parametrize("full", [True, False])
def test_figures_are_written_after_success_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, proven: bool, full: bool
) -> None:
    score = {"mean_reward": 0.0}
    task = {"prompts": 64, "before": score, "after": score, "proven": proven}
    done = demo.Done(SimpleNamespace(), Results(), {"required_gain": 0.3, "tasks": {"json": task}}, 1.0)  # type: ignore[arg-type]
    module = demo_full if full else demo
    monkeypatch.setattr(module, "perform", lambda *arguments: done)
    monkeypatch.setattr(demo, "run_baseline", lambda *arguments: None)
    bench = tmp_path / "demo.json"
    with nullcontext() if proven else pytest.raises(DemoError, match="reward gain below"):
        (demo_full.run_demo_full if full else run_demo)(tmp_path / "demo", bench)
    assert bench.exists() is proven

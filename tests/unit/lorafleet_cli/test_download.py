"""`lorafleet download`: whole, verified, and never over something else."""

import errno
import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from fastapi import FastAPI, Response

from support.cli_world import CliWorld, Served, pool, run

WEIGHTS, CONFIG = b"weights of step %d", b'{"r": 4}'


@pytest.fixture
def done(world: CliWorld, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> CliWorld:
    """A finished run with checkpoints of steps 2 and 4; the working directory is a fresh one."""
    item = run("json", "Completed", step=4, targetStep=4)
    world.runs.append(item)
    for step in (2, 4):
        write_checkpoint(world.directory(item) / f"step_{step}", step)
    path = world.directory(item) / "step_4"
    item["status"]["artifact"] = {"path": str(path), "step": 4, "digest": sha256(WEIGHTS % 4)}
    (tmp_path / "cwd").mkdir()
    monkeypatch.chdir(tmp_path / "cwd")
    return world


def write_checkpoint(path: Path, step: int) -> None:
    path.mkdir(parents=True)
    files = {"adapter_model.safetensors": WEIGHTS % step, "adapter_config.json": CONFIG, "optimizer.safetensors": b"o"}
    for name, data in files.items():
        (path / name).write_bytes(data)
    about = {name: {"bytes": len(data), "sha256": sha256(data)} for name, data in files.items()}
    (path / "state.json").write_text(json.dumps({"files": about}))


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_the_artifact_into_a_folder_of_the_runs_name(done: CliWorld) -> None:
    result = done.call("download", "json")
    assert result.exit_code == 0, result.output
    assert files(Path("json")) == {"adapter_model.safetensors": WEIGHTS % 4, "adapter_config.json": CONFIG}
    assert [path.name for path in Path().iterdir()] == ["json"]
    assert "json: PEFT adapter of step 4, sha256 verified against the run's status" in result.stdout


def test_another_kept_step_and_another_folder(done: CliWorld) -> None:
    result = done.call("download", "json", "--step", "2", "-o", "deep/er")
    assert result.exit_code == 0, result.output
    assert "step 2, sha256 as the runtime lists it" in result.stdout
    assert files(Path("deep/er"))["adapter_model.safetensors"] == WEIGHTS % 2
    assert done.error("download", "json", "--step", "3").endswith("kept are: 2, 4")


def test_it_does_not_overwrite_without_force(done: CliWorld) -> None:
    Path("json").mkdir()
    Path("json/adapter_config.json").write_text("mine")
    assert done.error("download", "json").startswith("error: output: json: it exists already")
    assert Path("json/adapter_config.json").read_text() == "mine"
    assert done.call("download", "json", "--force").exit_code == 0
    assert files(Path("json"))["adapter_config.json"] == CONFIG
    assert [path.name for path in Path().iterdir()] == ["json"]


def test_force_leaves_what_is_no_adapter(done: CliWorld) -> None:
    Path("json").mkdir()
    Path("json/thesis.tex").write_text("years of work")
    assert "it holds more than an adapter" in done.error("download", "json", "--force")
    assert Path("json/thesis.tex").exists()


def test_a_digest_that_differs_leaves_nothing(done: CliWorld) -> None:
    done.runs[0]["status"]["artifact"]["digest"] = sha256(b"other weights")
    assert done.error("download", "json").startswith("error: sha256 of adapter_model.safetensors: ")
    assert list(Path().iterdir()) == []


@pytest.fixture
def lying(done: CliWorld) -> Iterator[dict[str, Any]]:
    """A runtime that is not ours; what it lists for step 4 is the test's, and it serves any name."""
    app, entry = FastAPI(), {"step": 4, "path": "/x", "files": []}

    @app.get("/v1/runs/{namespace}/{name}/{uid}/artifacts")
    async def artifacts() -> dict[str, Any]:
        return {"artifacts": [entry]}

    @app.get("/v1/runs/{namespace}/{name}/{uid}/artifacts/4/{file:path}")
    async def file(file: str) -> Response:
        return Response(b"evil")

    served = Served(app).start()
    done.pools[:] = [pool(served.url)]
    yield entry
    served.stop()


def listed(*names: str) -> list[dict[str, Any]]:
    return [{"name": name, "bytes": 4, "sha256": sha256(b"evil")} for name in names]


def test_only_the_two_files_are_written_whatever_is_listed(
    done: CliWorld, lying: dict[str, Any], tmp_path: Path
) -> None:
    absolute = str(tmp_path / "absolute")
    lying["files"] = listed("../../../climbed", absolute, "adapter_model.safetensors", "adapter_config.json")
    done.runs[0]["status"]["artifact"]["digest"] = sha256(b"evil")
    result = done.call("download", "json")
    assert result.exit_code == 0, result.output
    assert files(Path("json")) == {"adapter_model.safetensors": b"evil", "adapter_config.json": b"evil"}
    assert not Path(absolute).exists()
    assert not list(tmp_path.rglob("*climbed*"))


@pytest.mark.parametrize("left_out", ["adapter_model.safetensors", "adapter_config.json"])
def test_a_file_that_is_not_listed(done: CliWorld, lying: dict[str, Any], left_out: str) -> None:
    lying["files"] = listed(*{"adapter_model.safetensors", "adapter_config.json"} - {left_out})
    assert done.error("download", "json").startswith(
        f"error: file: {left_out}: the runtime does not list it for step 4"
    )
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("step", [[], ["--step", "4"]])
def test_the_status_digest_counts_more_than_the_listing(done: CliWorld, lying: dict[str, Any], step: list[str]) -> None:
    lying["files"] = listed("adapter_model.safetensors", "adapter_config.json")
    assert done.error("download", "json", *step).startswith("error: sha256 of adapter_model.safetensors: ")
    assert list(Path().iterdir()) == []


def test_a_full_disk_leaves_nothing(done: CliWorld, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        def __init__(self, file: object) -> None:
            pass

        def __enter__(self) -> "Full":
            return self

        def __exit__(self, *_: object) -> None:
            pass

        def write(self, data: bytes) -> int:
            raise OSError(errno.ENOSPC, "No space left on device")

    original = Path.open

    def full(self: Path, mode: Any = "r", *rest: Any, **more: Any) -> Any:
        return Full(self) if mode == "wb" else original(self, mode, *rest, **more)

    monkeypatch.setattr(Path, "open", full)
    text = "error: output: json: the disk is full; free some space, or choose another --output"
    assert done.error("download", "json") == text
    assert list(Path().iterdir()) == []


def test_a_run_without_a_checkpoint(done: CliWorld) -> None:
    done.runs.append(run("new", step=1, targetStep=4))
    assert done.error("download", "new").startswith("error: run: new: it has no checkpoint yet (step 1)")


def test_a_checkpoint_that_is_gone_from_storage(done: CliWorld) -> None:
    (done.directory(done.runs[0]) / "step_4" / "adapter_model.safetensors").unlink()
    assert done.error("download", "json").startswith("error: step: 4: no checkpoint of it is on the pool's storage")

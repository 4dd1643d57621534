"""`lorafleet download RUN`: the servable PEFT adapter, checked against the run's status, into a local folder."""

import errno
import hashlib
import shutil
import sys
import tempfile
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from lorafleet_cli import facts
from lorafleet_cli.errors import CliError
from lorafleet_cli.kube import Kube, Object
from lorafleet_cli.runtime import Runtime, open_runtime

WEIGHTS, CONFIG = "adapter_model.safetensors", "adapter_config.json"


async def download(kube: Kube, console: Console, name: str, output: Path, *, step: int | None, force: bool) -> None:
    """Write the two files of an adapter into `output`, whole or not at all.

    Raises:
        CliError: there is no such checkpoint, `output` is taken, the disk is full, or what came is not what was saved.
    """
    run = await kube.run(name)
    _check_free(output, force)
    async with open_runtime(kube, await kube.pool_of(run)) as runtime:
        chosen = _choose(run, (await runtime.get(run, "artifacts"))["artifacts"], step)
        try:
            output.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=output.parent, prefix=f".{output.name}-") as folder:
                partial = Path(folder) / "adapter"
                partial.mkdir()
                await _fetch(runtime, run, chosen, partial)
                _put(partial, output)
        except OSError as error:
            if error.errno == errno.ENOSPC:
                text = "the disk is full; free some space, or choose another --output"
            else:
                text = f"cannot be written ({error.strerror}); choose another --output"
            raise CliError("output", output, text) from error
    told = "verified against the run's status" if chosen["in_status"] else "as the runtime lists it"
    console.print(f"{output}: PEFT adapter of step {chosen['step']}, sha256 {told}", markup=False, soft_wrap=True)


def _check_free(output: Path, force: bool) -> None:
    if not output.exists() and not output.is_symlink():
        return
    if not force:
        raise CliError("output", output, "it exists already; choose another --output, or pass --force")
    if not output.is_dir() or output.is_symlink() or {path.name for path in output.iterdir()} - {WEIGHTS, CONFIG}:
        raise CliError("output", output, "it holds more than an adapter, so --force leaves it; choose another --output")


def _choose(run: Object, artifacts: list[dict[str, Any]], step: int | None) -> dict[str, Any]:
    """The checkpoint to fetch: its step, and the digests and sizes of the two files, whatever else is listed.

    The weights' digest is the status' own where it has one: the API server's word counts more than the runtime's.
    """
    status = facts.status_of(run).get("artifact")
    if status is None and step is None:
        done, _ = facts.progress(run)
        text = f"it has no checkpoint yet (step {done}); wait for checkpoint.intervalSteps, or for its end"
        raise CliError("run", run["metadata"]["name"], text)
    wanted = status["step"] if step is None and status is not None else step
    found = next((a for a in artifacts if a["step"] == wanted), None)
    if found is None:
        kept = ", ".join(str(a["step"]) for a in artifacts) or "none"
        raise CliError("step", wanted, f"no checkpoint of it is on the pool's storage; kept are: {kept}")
    listed = {file["name"]: file for file in found["files"]}
    for name in (WEIGHTS, CONFIG):
        if name not in listed:
            text = f"the runtime does not list it for step {wanted}; choose another --step, or see the storage"
            raise CliError("file", name, text)
    digests = {name: listed[name]["sha256"] for name in (WEIGHTS, CONFIG)}
    in_status = status is not None and status["step"] == wanted
    if status is not None and in_status:
        digests[WEIGHTS] = status["digest"]
    sizes = {name: listed[name]["bytes"] for name in (WEIGHTS, CONFIG)}
    return {"step": wanted, "in_status": in_status, "sha256": digests, "bytes": sizes}


async def _fetch(runtime: Runtime, run: Object, chosen: dict[str, Any], folder: Path) -> None:
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    errors = Console(file=sys.stderr)
    with Progress(*columns, console=errors, disable=not errors.is_terminal, transient=True) as progress:
        for name in (WEIGHTS, CONFIG):
            digest = chosen["sha256"][name]
            task = progress.add_task(name, total=chosen["bytes"][name])
            hashed = hashlib.sha256()
            with (folder / name).open("wb") as file:
                async with runtime.stream(run, f"artifacts/{chosen['step']}/{name}") as response:
                    async for chunk in response.aiter_bytes():
                        file.write(chunk)
                        hashed.update(chunk)
                        progress.advance(task, len(chunk))
            if hashed.hexdigest() != digest:
                text = f"it should be {digest[:12]}...; try again, and if it stays so, the file is damaged"
                raise CliError(f"sha256 of {name}", hashed.hexdigest()[:12] + "...", text)


def _put(partial: Path, output: Path) -> None:
    if output.exists():  # --force, and it holds an adapter only
        aside = partial.with_name("old")
        output.rename(aside)
        try:
            partial.rename(output)
        except OSError:
            aside.rename(output)
            raise
        shutil.rmtree(aside, ignore_errors=True)
    else:
        partial.rename(output)

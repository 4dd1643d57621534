"""The command `lorafleet-local`: parses, then calls `stack` or a demo. Imports them late, so that help is quick."""

import shlex
import signal
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, NoReturn

import typer

from lorafleet_local.paths import state_dir

app = typer.Typer(
    no_args_is_help=True, pretty_exceptions_enable=False, help="LoraFleet on one machine: real parts, no containers."
)
StateOption = Annotated[
    Path | None, typer.Option("--state-dir", help="State folder; default $LORAFLEET_STATE_DIR, else .lorafleet/.")
]
OwnerOption = Annotated[
    int | None, typer.Option("--owner", help="Pid of the parent process, make's; this command ends with it.")
]
BenchOption = Annotated[Path | None, typer.Option("--bench", help="Write the measured figures to this file.")]
NOT_RUNNING = 3
"""Exit status of `status` when the stack is down, as of `systemctl status`."""


def _end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    for other in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        signal.signal(other, signal.SIG_IGN)  # what follows is stopping, which nothing but SIGKILL should cut short
    if number == signal.SIGINT:
        raise KeyboardInterrupt
    raise SystemExit(128 + number)  # an exception, so that whatever was started is stopped on the way out


def _prepare(owner: int | None = None) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        if signal.getsignal(number) is not signal.SIG_IGN:  # as under nohup
            signal.signal(number, _end_on_signal)
    if owner is not None:
        from lorafleet_local.processes import end_with_parent

        end_with_parent(signal.SIGTERM, owner)


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


def _folder(state: Path | None) -> Path:
    return (state or state_dir()).absolute()


@app.command()
def up(
    state: StateOption = None,
    pool_file: Annotated[
        Path | None, typer.Option("--pool", help="AdapterPool manifest whose spec is laid over the default pool's.")
    ] = None,
    owner: OwnerOption = None,
) -> None:
    """Start control plane, runtime and operator, and wait until the pool is Ready."""
    _prepare(owner)
    from lorafleet_local import pool, stack
    from lorafleet_local.guardian import guarded
    from lorafleet_local.model import ensure_model
    from lorafleet_local.report import Reporter
    from lorafleet_local.tasks import write_tasks

    folder = _folder(state)
    try:
        defaults = pool.pool_spec(ensure_model(), folder / "storage")
        spec = None if pool_file is None else pool.read_pool_file(pool_file, defaults)
        with guarded(folder) as me:
            running = stack.up(folder, Reporter(), spec, owner=me)
        write_tasks(running.storage)  # so that manifests/examples can be applied
    except (pool.PoolFileError, *stack.START_ERRORS) as error:
        _fail(error)
    kubectl, bin_dir = stack.find_kubectl(), _short(Path(sys.executable).parent)
    example = _short(Path(__file__).resolve().parents[2] / "manifests" / "examples" / "addition.yaml")
    typer.echo(
        f"\nNext:\n  export KUBECONFIG={shlex.quote(str(running.kubeconfig))}"
        f"\n  {_short(Path(kubectl))} apply -f {example}"
        f"\n  {bin_dir}/lorafleet watch addition"
        f"\nData and checkpoints: {running.storage}\nLogs: {folder / 'log'}\nStop it: make down"
    )


def _short(path: Path) -> str:
    """A path as one would type it here."""
    found = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path
    return shlex.quote(str(found))


@app.command()
def down(state: StateOption = None) -> None:
    """Stop every process that this checkout started; objects, checkpoints and logs stay.

    Without --state-dir also those of a demo. A demo or an `up` that is under way is ended.
    """
    _prepare()
    from lorafleet_local import stack
    from lorafleet_local.report import Reporter

    folders = [_folder(state)] if state is not None else [_folder(None) / "demo", _folder(None)]
    reporter = Reporter()
    try:
        found = [stack.down(folder, reporter) for folder in folders]
    except stack.START_ERRORS as error:
        _fail(error)
    if not any(found):
        typer.echo("nothing was running")


@app.command()
def status(state: StateOption = None) -> None:
    """Show which processes live; exit status 3 when the stack is not running."""
    from lorafleet_local import stack

    folder = _folder(state)
    for name, alive in stack.status(folder).items():
        typer.echo(f"{name:26} {'running' if alive else 'ended'}")
    running = stack.load(folder)
    if running is None:
        typer.echo("not running: start it with `make up`")
        raise typer.Exit(NOT_RUNNING)
    typer.echo(f"running: export KUBECONFIG={shlex.quote(str(running.kubeconfig))}; stop it with `make down`")


@app.command()
def env(state: StateOption = None) -> None:
    """Print shell exports: KUBECONFIG, and the runtime's URL and token file."""
    from lorafleet_local import stack

    running = stack.load(_folder(state))
    if running is None:
        typer.echo("error: the stack is not running; start it with `make up`", err=True)
        raise typer.Exit(1)
    values = {
        "KUBECONFIG": running.kubeconfig,
        "LORAFLEET_RUNTIME_URL": running.runtime_url,
        "LORAFLEET_RUNTIME_TOKEN_FILE": running.token_file,
    }
    for name, value in values.items():
        typer.echo(f"export {name}={shlex.quote(str(value))}")


@app.command()
def demo(state: StateOption = None, bench: BenchOption = None, owner: OwnerOption = None) -> None:
    """Train three adapters through AdapterRun objects and prove that they learnt; exit 0 only then."""
    _demo(state, bench, owner, full=False)


@app.command()
def demo_full(state: StateOption = None, bench: BenchOption = None, owner: OwnerOption = None) -> None:
    """The demo with four more runs: one late, one suspended, one deleted, one broken; exit 0 only when all is well."""
    _demo(state, bench, owner, full=True)


def _demo(state: Path | None, bench: Path | None, owner: int | None, *, full: bool) -> None:
    _prepare(owner)
    from lorafleet_local import stack
    from lorafleet_local.demo import DemoError, run_demo
    from lorafleet_local.demo_full import run_demo_full

    try:
        (run_demo_full if full else run_demo)(state or state_dir() / "demo", bench)
    except (DemoError, *stack.START_ERRORS) as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    app()

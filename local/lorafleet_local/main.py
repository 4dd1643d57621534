"""The command `lorafleet-local`: parses, then calls `stack` or `demo`. Imports them late, so that help is quick."""

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


def _end_on_signal(number: int, frame: FrameType | None) -> NoReturn:
    raise SystemExit(128 + number)  # an exception, so that whatever was started is stopped on the way out


def _prepare() -> None:
    signal.signal(signal.SIGTERM, _end_on_signal)
    signal.signal(signal.SIGHUP, _end_on_signal)


def _fail(error: Exception) -> NoReturn:
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(1)


@app.command()
def up(state: StateOption = None) -> None:
    """Start control plane, runtime and operator, and wait until the pool is Ready."""
    _prepare()
    from lorafleet_local import stack
    from lorafleet_local.report import Reporter
    from lorafleet_local.tasks import write_tasks

    folder = state or state_dir()
    try:
        running = stack.up(folder, Reporter())
        write_tasks(running.storage)  # so that manifests/examples can be applied
    except stack.START_ERRORS as error:
        _fail(error)
    kubeconfig = shlex.quote(str(running.kubeconfig))
    typer.echo(
        f"\nUse it:\n  export KUBECONFIG={kubeconfig}\n  {stack.find_kubectl()} apply -f adapterrun.yaml"
        f"\n  {stack.find_kubectl()} get adapterruns -w"
        f"\nData and checkpoints: {running.storage}\nLogs: {folder / 'log'}"
    )


@app.command()
def down(state: StateOption = None) -> None:
    """Stop every process that `up` started; objects, checkpoints and logs stay."""
    _prepare()
    from lorafleet_local import stack
    from lorafleet_local.report import Reporter

    stack.down(state or state_dir(), Reporter())


@app.command()
def status(state: StateOption = None) -> None:
    """Show which processes live; exit 1 when the stack is not up."""
    from lorafleet_local import stack

    folder = state or state_dir()
    for name, alive in stack.status(folder).items():
        typer.echo(f"{name:26} {'running' if alive else 'ended'}")
    if stack.load(folder) is None:
        typer.echo("not up")
        raise typer.Exit(1)


@app.command()
def env(state: StateOption = None) -> None:
    """Print shell exports: KUBECONFIG, and the runtime's URL and token file."""
    from lorafleet_local import stack

    running = stack.load(state or state_dir())
    if running is None:
        typer.echo("error: the stack is not up; run `make up`", err=True)
        raise typer.Exit(1)
    values = {
        "KUBECONFIG": running.kubeconfig,
        "LORAFLEET_RUNTIME_URL": running.runtime_url,
        "LORAFLEET_RUNTIME_TOKEN_FILE": running.token_file,
    }
    for name, value in values.items():
        typer.echo(f"export {name}={shlex.quote(str(value))}")


@app.command()
def demo(
    state: StateOption = None,
    bench: Annotated[Path | None, typer.Option("--bench", help="Write the measured figures to this file.")] = None,
) -> None:
    """Train three adapters through AdapterRun objects and prove that they learnt; exit 0 only then."""
    _prepare()
    from lorafleet_local import stack
    from lorafleet_local.demo import DemoError, run_demo

    try:
        run_demo(state or state_dir() / "demo", bench)
    except (DemoError, *stack.START_ERRORS) as error:
        _fail(error)
    except KeyboardInterrupt:
        sys.exit(130)


if __name__ == "__main__":
    app()

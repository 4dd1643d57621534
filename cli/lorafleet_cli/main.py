"""The commands `lorafleet` and `kubectl lorafleet`: parse, connect, call; errors in one line.

Each command's module is imported when it is called, so that help and usage errors are quick.
"""

import asyncio
import os
import signal
import sys
import traceback
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Annotated, NoReturn

import typer
from rich.console import Console

from lorafleet_cli.errors import CliError
from lorafleet_cli.kube import Kube
from lorafleet_cli.kubeconfig import Access, connect

app = typer.Typer(
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="AdapterRuns at a glance: progress, logs, samples and adapters, through your kubeconfig.",
)

_PLAIN_WIDTH = 200
_INTERRUPTED = 130

Namespace = Annotated[str | None, typer.Option("--namespace", "-n", help="Namespace; the context's by default.")]
Context = Annotated[str | None, typer.Option("--context", help="Context; the kubeconfig's current one by default.")]
Kubeconfig = Annotated[Path | None, typer.Option("--kubeconfig", help="Default: $KUBECONFIG, else ~/.kube/config.")]
Debug = Annotated[bool, typer.Option("--debug", help="Show the traceback of an error.")]
Json = Annotated[bool, typer.Option("--json", help="JSON instead of text.")]
Run = Annotated[str, typer.Argument(metavar="RUN", help="Name of an AdapterRun.")]
MaybeRun = Annotated[str | None, typer.Argument(metavar="[RUN]", help="Name of an AdapterRun; all of them by default.")]


@app.command()
def status(
    run: MaybeRun = None,
    *,
    everywhere: Annotated[bool, typer.Option("--all-namespaces", "-A", help="Runs of all namespaces.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    debug: Debug = False,
) -> None:
    """Pools and runs in one look, or one run in full."""
    from lorafleet_cli.status import show_all, show_one

    console = _console()
    if run is not None and everywhere:
        raise typer.BadParameter("a RUN is in one namespace; leave out --all-namespaces")

    async def call(kube: Kube) -> None:
        await (show_all(kube, console, everywhere=everywhere) if run is None else show_one(kube, console, run))

    _run(call, Access(kubeconfig, context, namespace), debug)


@app.command()
def watch(
    run: MaybeRun = None,
    *,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    debug: Debug = False,
) -> None:
    """Live progress until the runs are finished; exit 1 when one failed or was cancelled."""
    from lorafleet_cli.watch import watch as command

    _run(lambda kube: command(kube, _console(), run), Access(kubeconfig, context, namespace), debug)


@app.command()
def logs(
    run: Run,
    *,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Go on until the run has ended.")] = False,
    as_json: Json = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    debug: Debug = False,
) -> None:
    """The runtime's own log of a run."""
    from lorafleet_cli.logs import logs as command

    console = _console()
    access = Access(kubeconfig, context, namespace)
    _run(lambda kube: command(kube, console, run, follow=follow, as_json=as_json), access, debug)


@app.command()
def samples(
    run: Run,
    *,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Optimizer step; the newest recorded.")] = None,
    as_json: Json = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    debug: Debug = False,
) -> None:
    """What the model wrote in one step, with rewards and advantages."""
    from lorafleet_cli.samples import samples as command

    access = Access(kubeconfig, context, namespace)
    _run(lambda kube: command(kube, _console(), run, step=step, as_json=as_json), access, debug)


@app.command()
def download(
    run: Run,
    *,
    output: Annotated[Path | None, typer.Option("--output", "-o", help="Folder to make; ./RUN by default.")] = None,
    step: Annotated[int | None, typer.Option("--step", min=1, help="Another kept checkpoint.")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace an adapter that is there.")] = False,
    namespace: Namespace = None,
    context: Context = None,
    kubeconfig: Kubeconfig = None,
    debug: Debug = False,
) -> None:
    """The servable PEFT adapter, its sha256 checked."""
    from lorafleet_cli.download import download as command

    access = Access(kubeconfig, context, namespace)
    target = Path(run) if output is None else output
    _run(lambda kube: command(kube, _console(), run, target, step=step, force=force), access, debug)


@app.command()
def convert(
    file: Annotated[Path, typer.Argument(metavar="FILE", help="A miles adapter.yaml.")],
    *,
    name: Annotated[str | None, typer.Option("--name", help="Name of the AdapterRun.")] = None,
    pool: Annotated[str, typer.Option("--pool", help="Name of the AdapterPool.")] = "demo",
    debug: Debug = False,
) -> None:
    """Print an AdapterRun made from a miles adapter.yaml; exit 2 when it cannot be one."""
    from lorafleet_cli.convert import Unusable
    from lorafleet_cli.convert import convert as command

    try:
        manifest, warnings = command(file, name, pool)
    except Unusable as error:
        _fail(error, debug, code=2)
    for warning in warnings:
        typer.echo(warning, err=True)
    try:
        typer.echo(manifest, nl=False)
    except BrokenPipeError:
        _end_pipe()


@app.command()
def replay(
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="Of the run: NAMESPACE/NAME/UID on storage.")],
    *,
    base_model: Annotated[Path, typer.Option("--base-model", help="Directory of the base model's files.")],
    steps: Annotated[str | None, typer.Option("--steps", metavar="A:B", help="All recorded ones by default.")] = None,
    tolerance: Annotated[float | None, typer.Option("--tolerance", help="Default: by the run's dtype.")] = None,
    dtype: Annotated[str | None, typer.Option("--dtype", help="float32 or float64; the masters' by default.")] = None,
    device: Annotated[str, typer.Option("--device", help="torch device.")] = "cpu",
    debug: Debug = False,
) -> None:
    """Train a run with recordSteps again, with plain PEFT and torch; exit 1 when it comes to another adapter."""
    from lorafleet_cli.replay import replay as command

    if dtype not in (None, "float32", "float64"):
        raise typer.BadParameter(f"{dtype}: give float32 or float64", param_hint="--dtype")

    def call() -> int:
        return command(
            _console(), directory, base_model, steps=steps, tolerance=tolerance, dtype=dtype, device=device
        )  # fmt: skip

    _finish(call, debug)


def main() -> None:
    """Entry point of both names."""
    for signum in (signal.SIGTERM, signal.SIGHUP):
        if signal.getsignal(signum) is not signal.SIG_IGN:  # as under nohup
            signal.signal(signum, _stop)
    name = Path(sys.argv[0]).name
    app(prog_name="kubectl lorafleet" if name.startswith("kubectl-") else "lorafleet")


def _stop(signum: int, _: object) -> NoReturn:
    """An ordinary end, so that the temporary folder with the user's key is removed."""
    for other in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(other, signal.SIG_IGN)
    raise SystemExit(128 + signum)


class _Console(Console):
    """Leaves a closed pipe to the command's border, where rich would exit with 1."""

    def on_broken_pipe(self) -> None:
        """Called where a BrokenPipeError is handled."""
        raise


def _console() -> Console:
    console = _Console(highlight=False)
    if not console.is_terminal:
        console.width = _PLAIN_WIDTH  # for files and pipes: no line is cut
    return console


def _run(command: Callable[[Kube], Awaitable[int | None]], access: Access, debug: bool) -> None:
    async def connected() -> int | None:
        async with connect(access) as kube:
            return await command(kube)

    _finish(lambda: asyncio.run(connected()), debug)


def _finish(command: Callable[[], int | None], debug: bool) -> NoReturn:
    try:
        code = command()
    except CliError as error:
        _fail(error, debug)
    except KeyboardInterrupt:
        raise typer.Exit(_INTERRUPTED) from None
    except BrokenPipeError:
        _end_pipe()
    except Exception as error:  # noqa: BLE001 (the command's border: a traceback is for --debug)
        unexpected = CliError("internal error", type(error).__name__, f"{error}; run it with --debug and report it")
        unexpected.__cause__ = error
        _fail(unexpected, debug)
    raise typer.Exit(code or 0)


def _end_pipe() -> NoReturn:
    """The reader of our output has enough, as `head` does: end as one whom SIGPIPE ends, without its noise."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    raise typer.Exit(128 + signal.SIGPIPE)


def _fail(error: CliError, debug: bool, code: int = 1) -> NoReturn:
    if debug:
        traceback.print_exception(error)
    typer.echo(f"error: {error}", err=True)
    raise typer.Exit(code)

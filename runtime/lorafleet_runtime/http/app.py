"""The FastAPI application: routers, token check and RFC 9457 problem answers."""

import hmac
import logging
import math
from collections.abc import Callable

from fastapi import Depends, FastAPI, Request, Response
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from prometheus_client import CollectorRegistry, generate_latest
from starlette.exceptions import HTTPException

from lorafleet_api.v1alpha1.wire import Problem
from lorafleet_runtime.errors import sendable
from lorafleet_runtime.http.adapter_runs import adapter_runs_router, switched_off_router
from lorafleet_runtime.http.records import RecordProblem, records_router
from lorafleet_runtime.http.v1 import v1_router
from lorafleet_runtime.loop.api_runs import ApiRuns, Refused
from lorafleet_runtime.loop.fleet_view import FleetView
from lorafleet_runtime.registry.admission import SpecProblem
from lorafleet_runtime.registry.registry import StaleOperator

log = logging.getLogger(__name__)


def create_app(
    view: FleetView, token: Callable[[], str], metrics: CollectorRegistry, *, adapter_runs: ApiRuns | None = None
) -> FastAPI:
    """The application.

    Args:
        view: the registry and the loop's wake-up.
        token: reads the bearer token; called for every request, so that it can be rotated.
        metrics: what /metrics shows.
        adapter_runs: serve miles' routes over these runs; None answers that they are off.
    """
    app = FastAPI(title="LoraFleet runtime", version="v1")
    guard = Depends(_bearer(token))
    app.include_router(v1_router(view), dependencies=[guard])
    app.include_router(records_router(view.storage_root), dependencies=[guard])
    miles = switched_off_router() if adapter_runs is None else adapter_runs_router(adapter_runs, view.storage_root)
    app.include_router(miles, dependencies=[guard])

    @app.get("/healthz")
    async def healthz() -> dict[str, str | int]:
        """The process serves."""
        return {"status": "ok", "bootEpoch": view.registry.boot_epoch}

    @app.get("/readyz")
    async def readyz() -> JSONResponse:
        """The operator has spoken, the trainer and an engine answer."""
        ready = view.ready
        return JSONResponse({"ready": ready}, status_code=200 if ready else 503)

    @app.get("/metrics", dependencies=[guard])
    async def show_metrics() -> Response:
        """Prometheus text format."""
        return Response(generate_latest(metrics), media_type="text/plain; version=0.0.4; charset=utf-8")

    _problems(app)
    return app


def _bearer(token: Callable[[], str]) -> Callable[[Request], None]:
    def check(request: Request) -> None:
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode(), token().encode()):
            raise HTTPException(401, "Authorization: send 'Bearer TOKEN' with the token of this runtime's token file")

    return check


def _problems(app: FastAPI) -> None:
    @app.exception_handler(SpecProblem)
    async def spec_problem(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, SpecProblem)
        return problem(422, "Invalid spec", str(error), error.field, error.value, error.fix)

    @app.exception_handler(RecordProblem)
    async def record_problem(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RecordProblem)
        return problem(error.status, "No such record", str(error), error.field, error.value, error.fix)

    @app.exception_handler(Refused)
    async def refused(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, Refused)
        return problem(error.status, "Refused", str(error), error.field, error.value, error.fix)

    @app.exception_handler(StaleOperator)
    async def stale(_: Request, error: Exception) -> JSONResponse:
        return problem(409, "Newer operator", str(error), field="operatorEpoch", fix="this operator must exit")

    @app.exception_handler(RequestValidationError)
    async def bad_request(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, RequestValidationError)
        first = error.errors()[0]
        field = ".".join(str(p) for p in first["loc"][1:])
        return problem(422, "Invalid request", f"{field}: {first['msg']}", field, first.get("input"), first["msg"])

    @app.exception_handler(HTTPException)
    async def plain(_: Request, error: Exception) -> JSONResponse:
        assert isinstance(error, HTTPException)
        return problem(error.status_code, "Refused", str(error.detail))

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        log.error("%s %s raised", request.method, request.url.path, exc_info=error)
        return problem(500, "Internal error", f"{type(error).__name__}; the runtime's log has the traceback")


def problem(  # every part of RFC 9457 that we send
    status: int,
    title: str,
    detail: str,
    field: str | None = None,
    value: object = None,
    fix: str | None = None,
) -> JSONResponse:
    """An RFC 9457 answer."""
    plain = isinstance(value, str | int | bool | None) or (isinstance(value, float) and math.isfinite(value))
    shown = value if plain else repr(value)[:200]  # NaN is no JSON
    if isinstance(shown, str):
        shown = sendable(shown[:200])
    names = None if field is None else sendable(field)
    body = Problem(title=title, status=status, detail=sendable(detail), field=names, value=shown, fix=fix)
    return JSONResponse(body.to_wire(), status_code=status, media_type="application/problem+json")

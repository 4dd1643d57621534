"""No order of events breaks the registry's invariants."""

from hypothesis import given, settings
from hypothesis import strategies as st

from lorafleet_api.v1alpha1 import reasons
from lorafleet_runtime.registry.registry import Registry
from lorafleet_runtime.registry.run import HOLDS_SLOT, TERMINAL
from lorafleet_runtime.types import Cursor, Loaded, PolicySums, RunFault, StepResult
from support.runs import DATASET, pool_spec, put

EVENTS = [
    "put", "check", "assign", "load", "publish", "commit", "step", "save", "clean",
    "delete", "suspend", "resume", "cancel", "fail", "crash",
]  # fmt: skip
OPERATIONS = st.lists(st.tuples(st.sampled_from(EVENTS), st.sampled_from(["a", "b", "c", "d"])), max_size=60)


@settings(max_examples=300, deadline=None)
@given(OPERATIONS)
def test_no_order_of_events_shares_a_slot_or_loses_one(operations: list[tuple[str, str]]) -> None:
    registry = Registry(pool_spec(), boot_epoch=1)
    registry.observe_trainer({})
    registry.sync([])
    for generation, (name, uid) in enumerate(operations, start=2):
        apply(registry, name, uid, generation)
        held = [r.slot for r in registry.runs.values() if r.state in HOLDS_SLOT]
        assert len(held) == len(set(held))
        assert None not in held
        assert all(r.slot is None for r in registry.runs.values() if r.state in TERMINAL or r.state == "QUEUED")
        assert all(0 <= r.accumulated_groups <= r.groups_per_step for r in registry.runs.values())
    for run in registry.runs.values():
        if run.state == "ACTIVE":
            assert run.weight_version > 0


def apply(registry: Registry, name: str, uid: str, generation: int) -> None:
    run = registry.runs.get(uid)
    match name:
        case "put" | "resume":
            put(registry, uid, generation=generation)
        case "suspend" | "cancel":
            put(registry, uid, generation=generation, **{name: True})
        case "assign":
            registry.assign()
        case "delete":
            registry.delete(uid)
        case "crash":
            registry.trainer_lost()
            registry.observe_trainer({})
        case _ if run is not None:
            _progress(registry, name, uid)


def _progress(registry: Registry, name: str, uid: str) -> None:
    run = registry.runs[uid]
    if name == "check" and run.state == "QUEUED":
        registry.checked(uid, DATASET)
    elif name == "load" and run.state == "PENDING" and not run.loaded:
        registry.loaded(Loaded(uid, 0, Cursor()), now=1.0)
    elif name == "publish" and run.state in ("PENDING", "ACTIVE") and run.loaded:
        registry.published(uid, run.trainer_version, 1.0)
    elif name == "commit" and run.state == "ACTIVE" and run.accumulated_groups < run.groups_per_step:
        registry.commit(uid, 1, [1.0], PolicySums())
    elif name == "step" and run.state == "ACTIVE" and run.accumulated_groups == run.groups_per_step:
        registry.stepped(StepResult(uid, run.step + 1, 1e-3, 1.0), 2.0)
    elif name == "save" and run.state == "RETIRING":
        registry.saved(uid, None, now=9.0)
    elif name == "clean" and run.state == "CLEANUP":
        registry.cleaned(uid)
    elif name == "fail":
        registry.fail(RunFault(uid, reasons.NON_FINITE, "x"))

"""The store: newer versions win, indexes follow."""

from typing import Any

from lorafleet_operator.store import Key, Store
from support.operator_world import UID, run_object

RUN = Key("adapterruns", "team", "r")
POOL = Key("adapterpools", "team", "demo")


def at(version: int, uid: str = UID, **spec: Any) -> dict[str, Any]:
    """The run at a resourceVersion."""
    run = run_object(**spec)
    run["metadata"] |= {"resourceVersion": str(version), "uid": uid}
    return run


def test_older_version_is_ignored() -> None:
    store = Store()
    assert store.put(RUN, at(10, numStep=10))
    assert not store.put(RUN, at(9))
    assert not store.put(RUN, at(10))
    kept = store.get(RUN)
    assert kept is not None
    assert kept["spec"]["numStep"] == 10


def test_recreated_object_replaces_the_old_one_in_every_index() -> None:
    store = Store()
    store.put(RUN, at(10))
    assert store.put(RUN, at(4, uid="new", poolRef={"name": "other"}))
    assert store.run_by_uid(UID) is None
    assert store.run_by_uid("new") == RUN
    assert store.runs_of(POOL) == ()
    assert store.runs_of(Key("adapterpools", "team", "other")) == (RUN,)


def test_late_delete_of_the_old_object_keeps_the_new_one() -> None:
    store = Store()
    store.put(RUN, at(10, uid="new"))
    assert store.remove(RUN, UID) is None
    assert store.get(RUN) is not None


def test_complete_list_forgets_what_is_gone_but_not_what_is_newer_than_the_list() -> None:
    store = Store()
    store.put(RUN, at(10))
    assert store.replace_all("adapterruns", [], version=9) == set()
    assert store.get(RUN) is not None
    assert store.replace_all("adapterruns", [], version=10) == {RUN}
    assert store.get(RUN) is None


def test_managed_fields_are_not_kept() -> None:
    store = Store()
    run = at(10)
    run["metadata"]["managedFields"] = [{"manager": "kubectl"}]
    store.put(RUN, run)
    kept = store.get(RUN)
    assert kept is not None
    assert "managedFields" not in kept["metadata"]

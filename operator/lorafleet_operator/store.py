"""The newest known AdapterRuns and AdapterPools, in memory. Filled by watches, lists and our own writes.

Read by the controller, the pool connections and the metrics collector. It holds objects, makes no decisions.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

from lorafleet_api.v1alpha1 import names

Object = dict[str, Any]
Kind = Literal["adapterruns", "adapterpools"]
KINDS: tuple[Kind, ...] = ("adapterpools", "adapterruns")
"""Pools first: a run is decided by its pool."""


@dataclass(frozen=True, slots=True)
class Key:
    """Names one object."""

    kind: Kind
    namespace: str
    name: str

    @classmethod
    def of_run(cls, obj: Object) -> "Key":
        """The key of an AdapterRun."""
        return cls("adapterruns", obj["metadata"]["namespace"], obj["metadata"]["name"])


def pool_key_of(run: Object) -> Key:
    """The pool that a run refers to."""
    ref = run["spec"]["poolRef"]
    return Key("adapterpools", ref.get("namespace") or run["metadata"]["namespace"], ref["name"])


class Store:
    """Objects by key, runs also by uid and by pool."""

    def __init__(self) -> None:
        self._objects: dict[Key, Object] = {}
        self._runs_by_uid: dict[str, Key] = {}
        self._runs_by_pool: dict[Key, set[Key]] = {}

    def get(self, key: Key) -> Object | None:
        """The newest known object, or None."""
        return self._objects.get(key)

    def run_by_uid(self, uid: str) -> Key | None:
        """The key of the live AdapterRun with this uid."""
        return self._runs_by_uid.get(uid)

    def runs_of(self, pool: Key) -> tuple[Key, ...]:
        """The runs that refer to a pool."""
        return tuple(self._runs_by_pool.get(pool, ()))

    def keys(self, kind: Kind) -> list[Key]:
        """All keys of a kind."""
        return [key for key in list(self._objects) if key.kind == kind]

    def objects(self, kind: Kind) -> list[Object]:
        """All objects of a kind; safe to call from another thread."""
        return [obj for key, obj in list(self._objects.items()) if key.kind == kind]

    def put(self, key: Key, obj: Object) -> bool:
        """Keeps `obj` unless a newer one of the same uid is known.

        Returns:
            Whether it was kept.
        """
        old = self._objects.get(key)
        if old is not None and old["metadata"]["uid"] == obj["metadata"]["uid"] and _version(old) >= _version(obj):
            return False
        if old is not None:
            self.remove(key)
        obj["metadata"].pop("managedFields", None)
        obj.setdefault("kind", names.RUN_KIND if key.kind == "adapterruns" else names.POOL_KIND)
        self._objects[key] = obj
        if key.kind == "adapterruns":
            self._runs_by_uid[obj["metadata"]["uid"]] = key
            self._runs_by_pool.setdefault(pool_key_of(obj), set()).add(key)
        return True

    def remove(self, key: Key, uid: str | None = None) -> Object | None:
        """Forgets an object, or (with `uid`) only that very one; returns what was forgotten."""
        obj = self._objects.get(key)
        if obj is None or (uid is not None and obj["metadata"]["uid"] != uid):
            return None
        del self._objects[key]
        if key.kind == "adapterruns":
            self._runs_by_uid.pop(obj["metadata"]["uid"], None)
            siblings = self._runs_by_pool.get(pool_key_of(obj), set())
            siblings.discard(key)
            if not siblings:
                self._runs_by_pool.pop(pool_key_of(obj), None)
        return obj

    def replace_all(self, kind: Kind, objects: Iterable[Object], version: int) -> set[Key]:
        """Takes a complete list: known newer objects stay, older ones that are not in it are forgotten.

        Args:
            kind: what was listed.
            objects: all there were.
            version: resourceVersion of the list; an object that a watch brought since then stays.

        Returns:
            The keys that changed or vanished.
        """
        listed = {Key(kind, obj["metadata"]["namespace"], obj["metadata"]["name"]): obj for obj in objects}
        changed = {key for key, obj in listed.items() if self.put(key, obj)}
        for key in self.keys(kind):
            if key not in listed and _version(self._objects[key]) <= version:
                self.remove(key)
                changed.add(key)
        return changed


def _version(obj: Object) -> int:
    """resourceVersion as a number (comparable by contract since Kubernetes 1.35, in practice always)."""
    text = obj["metadata"].get("resourceVersion", "0")
    return int(text) if text.isdigit() else 0

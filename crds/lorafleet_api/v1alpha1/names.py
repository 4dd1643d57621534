"""Names that both sides of the API use: group, plurals, finalizer, annotations. Imports nothing."""

GROUP = "lorafleet.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"

RUN_KIND = "AdapterRun"
RUN_PLURAL = "adapterruns"
RUN_SINGULAR = "adapterrun"
RUN_SHORT = "arun"

POOL_KIND = "AdapterPool"
POOL_PLURAL = "adapterpools"
POOL_SINGULAR = "adapterpool"
POOL_SHORT = "apool"

CATEGORY = "lorafleet"
"""`kubectl get lorafleet` lists both kinds."""

FINALIZER = f"{GROUP}/deregister"
"""On every AdapterRun that a runtime may know: the object stays until trainer and engines hold nothing of it."""

FORCE_RELEASE = f"{GROUP}/force-release"
"""Annotation; "true" on a deleted AdapterRun gives up the wait for its deregistration. Recorded as an Event."""

FIELD_MANAGER = "lorafleet-operator"
"""Field manager of the operator's writes and source component of its Events."""

"""Reads objects from the local API server, for progress only: changes go through kubectl or the operator.

Called by `stack` and `demo`.
"""

from pathlib import Path
from typing import Any

import httpx

from lorafleet_local.certs import ADMIN, Pki
from lorafleet_local.controlplane import client_context

GROUP_PATH = "/apis/lorafleet.dev/v1alpha1"


class Api:
    """A reading client with the administrator's certificate.

    Args:
        url: the API server.
        state_folder: where the PKI is.
    """

    def __init__(self, url: str, state_folder: Path) -> None:
        context = client_context(Pki(state_folder / "pki", (ADMIN,)), ADMIN)
        self._client = httpx.Client(base_url=url, verify=context, trust_env=False, timeout=10.0)

    def get(self, kind: str, name: str, namespace: str = "default") -> dict[str, Any] | None:
        """One object, or None where there is none.

        Raises:
            httpx.HTTPError: the API server is away or refuses.
        """
        answer = self._client.get(f"{GROUP_PATH}/namespaces/{namespace}/{kind}/{name}")
        if answer.status_code == httpx.codes.NOT_FOUND:
            return None
        answer.raise_for_status()
        found: dict[str, Any] = answer.json()
        return found

    def list(self, kind: str, namespace: str = "default") -> list[dict[str, Any]]:
        """All objects of a kind in a namespace.

        Raises:
            httpx.HTTPError: the API server is away or refuses.
        """
        answer = self._client.get(f"{GROUP_PATH}/namespaces/{namespace}/{kind}")
        answer.raise_for_status()
        items: list[dict[str, Any]] = answer.json()["items"]
        return items

    def close(self) -> None:
        """Close connections."""
        self._client.close()


def condition(item: dict[str, Any] | None, kind: str) -> dict[str, Any]:
    """A condition of an object; an empty one with status Unknown where it has none yet."""
    conditions = ((item or {}).get("status") or {}).get("conditions") or []
    unknown = {"status": "Unknown", "reason": "Pending", "message": ""}
    return next((found for found in conditions if found["type"] == kind), unknown)

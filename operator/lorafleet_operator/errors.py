"""Errors of the operator.

OperatorError
├── Temporary                 try again with backoff
│   ├── ApiUnavailable        the API server did not answer, or answered 429, 5xx or no JSON
│   ├── Conflict              409: the object changed since it was read; read again and decide again
│   └── RuntimeUnavailable    the runtime did not answer, or not in a way that is understood
└── Permanent                 trying again unchanged does not help
    ├── ApiRefused            the API server refused (403, 400, ...)
    │   ├── NotFound          404
    │   └── Invalid           422: schema or CEL; `causes` says which field
    ├── RuntimeUnauthorized   401 or 403 of the runtime: wrong token
    ├── RuntimeFenced         409 of the runtime: a newer operator owns it
    ├── SpecRefused           422 of the runtime: this run's spec
    └── ConfigError           kubeconfig or flags
"""


class OperatorError(Exception):
    """Root of the operator's errors."""


class Temporary(OperatorError):
    """Try again with backoff."""


class Permanent(OperatorError):
    """Trying again unchanged does not help."""


class ApiUnavailable(Temporary):
    """The API server did not answer (or was not asked, for want of a token), or answered 429, 5xx or no JSON."""


class Conflict(Temporary):
    """The object changed since it was read."""


class RuntimeUnavailable(Temporary):
    """The runtime did not answer, or not in a way that is understood."""


class ApiRefused(Permanent):
    """The API server refused a request.

    Args:
        status: HTTP status.
        message: the API server's own words.
        causes: "field: message" per invalid field; empty unless the refusal is about the object's content.
    """

    def __init__(self, status: int, message: str, causes: tuple[str, ...] = ()) -> None:
        super().__init__(status, message, causes)
        self.status = status
        self.message = message
        self.causes = causes

    def __str__(self) -> str:
        return f"{self.status}: {self.message}"


class NotFound(ApiRefused):
    """404."""


class Invalid(ApiRefused):
    """422: the schema or a CEL rule refuses the object."""


class RuntimeUnauthorized(Permanent):
    """The runtime refused the token."""


class RuntimeFenced(Permanent):
    """A newer operator owns the runtime; this one must stop."""


class SpecRefused(Permanent):
    """The runtime refused a run's spec.

    Args:
        reason: a member of lorafleet_api.v1alpha1.reasons.FAILURE_REASONS.
        message: names the field, the value and the fix.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(reason, message)
        self.reason = reason
        self.message = message

    def __str__(self) -> str:
        return f"{self.reason}: {self.message}"


class ConfigError(Permanent):
    """Kubeconfig or flags name the field, the value and the fix."""

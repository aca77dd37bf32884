"""Failures as OpenAI's API tells of them: a status and JSON."""

from typing import Any

from starlette.responses import JSONResponse

_TYPES = {401: "authentication_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """A failure that a client gets in place of an answer, with `headers`."""

    def __init__(self, status: int, message: str, code: str | None = None, param: str | None = None) -> None:
        super().__init__(message)
        self.status, self.message, self.code, self.param = status, message, code, param
        self.headers = {"Retry-After": "1"} if status in (429, 503) else {}

    def json(self) -> dict[str, Any]:
        kind = _TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    def response(self) -> JSONResponse:
        return JSONResponse(self.json(), self.status, self.headers)

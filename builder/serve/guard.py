"""Who may ask, and how much: keys, sizes of bodies, and requests of one client at a time."""

import asyncio
import hashlib
import hmac
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError
from starlette.requests import ClientDisconnect, Request

from trt_nvfp4.builder.errors import UsageError
from trt_nvfp4.builder.serve.failures import ApiError
from trt_nvfp4.common.json_text import read_text

_Body = TypeVar("_Body", bound=BaseModel)
# Seconds until a body must have come.
_SLOWEST_BODY = 30.0
#: Bytes of a body, of text and with images.
LARGEST_BODY, LARGEST_BODY_WITH_IMAGES = 1 << 20, 1 << 25
_LONGEST_MESSAGE = 500


def read_keys(file: Path) -> list[str]:
    """The keys in a file, one a line. Raises UsageError for a file without one, and for one that cannot be read."""
    try:
        keys = [line.strip() for line in read_text(file).splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UsageError(f"--api-key-file {file}: {getattr(error, 'strerror', None) or error}") from error
    if not keys or not all(key.isascii() for key in keys):
        raise UsageError(f"--api-key-file {file}: expected keys in ASCII, one a line")
    return keys


class Guard:
    """Checks requests before they are read."""

    def __init__(self, keys: list[str], most_of_a_client: int, largest_body: int = LARGEST_BODY) -> None:
        """`keys` [] lets everybody in. `largest_body` in bytes."""
        self._keys = [hashlib.sha256(key.encode()).digest() for key in keys]
        self._most, self._largest = most_of_a_client, largest_body
        self._requests: Counter[str] = Counter()

    def client(self, request: Request) -> str:
        """Who asks: by key, or by address where there are no keys. Raises ApiError for an unknown key."""
        if not self._keys:
            return request.client.host if request.client else ""
        given = request.headers.get("authorization", "").removeprefix("Bearer ").strip()
        digest = hashlib.sha256(given.encode("latin-1", "replace")).digest()
        # All of them, so that the time does not say which one is near.
        matches = [hmac.compare_digest(digest, key) for key in self._keys]
        if not any(matches):
            raise ApiError(401, "the API key is missing or wrong (Authorization: Bearer KEY)", "invalid_api_key")
        return f"key {matches.index(True) + 1}"

    @asynccontextmanager
    async def counted(self, client: str) -> AsyncIterator[None]:
        """Count a request while it is answered. Raises ApiError for one too many."""
        if self._requests[client] >= self._most:
            raise ApiError(429, f"this client has {self._most} requests already; wait for one of them")
        self._requests[client] += 1
        try:
            yield
        finally:
            self._requests[client] -= 1
            if not self._requests[client]:
                del self._requests[client]

    async def body(self, request: Request, kind: type[_Body]) -> _Body:
        """The body of a request, checked. Raises ApiError."""
        try:
            text = await asyncio.wait_for(self._read(request), _SLOWEST_BODY)
        except asyncio.TimeoutError:
            raise ApiError(408, f"the body did not come within {_SLOWEST_BODY:.0f} s") from None
        except ClientDisconnect:
            raise ApiError(400, "the connection ended within the body") from None
        try:
            return kind.model_validate_json(text)
        except ValidationError as error:
            errors = error.errors(include_url=False, include_context=False, include_input=False)
            nearest = max(errors, key=lambda each: len(each["loc"]))  # where a value may be of several kinds
            param = ".".join(str(part) for part in nearest["loc"])[:_LONGEST_MESSAGE]
            message = f"{param}: {nearest['msg']}" if param else nearest["msg"]
            raise ApiError(400, message[: 2 * _LONGEST_MESSAGE], param=param or None) from None

    async def _read(self, request: Request) -> bytes:
        found = bytearray()
        async for piece in request.stream():
            found += piece
            if len(found) > self._largest:
                raise ApiError(413, f"the body has more than {self._largest} bytes")
        return bytes(found)

"""Replicas of a server behind one address, by Ray Serve: `MODEL=/models/qwen.engine serve run ray_app:app`.

Each replica is a `trt-nvfp4 serve` process on a GPU of its own; Ray starts another where one ends. A request that a
server was answering when it ended gets status 502, or the end of its stream. Until Ray sees that the server has ended,
which takes seconds, its replica gives new requests back to Ray's proxy (PROXY), which finds another.
"""

import asyncio
import json
import os
import subprocess
import sys

import httpx2
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from ray import serve

router = FastAPI()
_PROXY = os.environ.get("PROXY", "http://127.0.0.1:8000")
# A header with a letter for each time that a request was given back, how many there may be, and seconds before each.
_GIVEN_BACK, _MOST, _PAUSE = "x-given-back", 40, 0.25


@serve.deployment(
    num_replicas=int(os.environ.get("REPLICAS", "2")),
    ray_actor_options={"num_gpus": float(os.environ.get("GPUS", "1"))},
    max_ongoing_requests=128,
    health_check_period_s=2,
    health_check_timeout_s=5,
)
@serve.ingress(router)
class Replica:
    """One server process, and the requests that are handed to it."""

    def __init__(self) -> None:
        command = [sys.executable, "-m", "trt_nvfp4.builder.cli.umbrella", "serve", os.environ["MODEL"], "--port", "0"]
        self._process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
        assert self._process.stderr is not None
        ready = next(found for line in self._process.stderr if (found := json.loads(line))["event"] == "ready")
        self._client = httpx2.AsyncClient(base_url=ready["address"], timeout=None)
        # The log goes on to Ray's.
        self._log = subprocess.Popen(["cat"], stdin=self._process.stderr)

    def check_health(self) -> None:
        if self._process.poll() is not None:
            raise RuntimeError(f"the server ended with exit code {self._process.returncode}")

    def __del__(self) -> None:
        self._process.terminate()

    @router.api_route("/{path:path}", methods=["GET", "POST"])
    async def hand_over(self, path: str, request: Request) -> Response:
        names = ("authorization", "content-type", "x-request-timeout")
        headers = {name: value for name, value in request.headers.items() if name in names}
        body, times = await request.body(), request.headers.get(_GIVEN_BACK, "")
        try:
            try:
                asked = self._client.build_request(request.method, f"/{path}", content=body, headers=headers)
                answer = await self._client.send(asked, stream=True)
            except httpx2.ConnectError:
                if len(times) >= _MOST:
                    raise
                await asyncio.sleep(_PAUSE)
                headers[_GIVEN_BACK] = f"{times}x"
                asked = self._client.build_request(request.method, f"{_PROXY}/{path}", content=body, headers=headers)
                answer = await self._client.send(asked, stream=True)
        except httpx2.HTTPError as error:
            failure = {
                "message": f"the replica has ended: {error}",
                "type": "server_error",
                "param": None,
                "code": None,
            }
            return JSONResponse({"error": failure}, 502)
        kind = answer.headers.get("content-type")
        return StreamingResponse(answer.aiter_raw(), answer.status_code, media_type=kind)


app = Replica.bind()

"""`trt-nvfp4 serve` in a process of its own, with the trained llama."""

import http.client
import json
import shutil
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

MODEL = Path(__file__).parents[2] / "trained_models" / "llama"
TEMPLATE = (
    "{% if tools %}{{ tools | tojson }}\n{% endif %}"
    "{% for message in messages %}{{ message.role }}: {{ message.content }}\n{% endfor %}assistant:"
)


@dataclass
class Server:
    process: subprocess.Popen[str]
    port: int
    log: list[dict[str, Any]]

    def client(self, key: str = "second") -> Any:
        openai = pytest.importorskip("openai")
        return openai.OpenAI(base_url=f"http://127.0.0.1:{self.port}/v1", api_key=key, max_retries=0, timeout=60)

    def post(self, body: bytes, path: str = "/v1/completions", **headers: str) -> tuple[int, dict[str, Any]]:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        connection.request("POST", path, body, {"Authorization": "Bearer first", **headers})
        answer = connection.getresponse()
        return answer.status, json.loads(answer.read())

    def get(self, path: str) -> str:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=60) as answer:
            return str(answer.read().decode())


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = tmp_path_factory.mktemp("served") / "llama"
    shutil.copytree(MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    (folder / "keys").write_text("first\nsecond\n")
    options = ["--port", "0", "--slots", "4", "--api-key-file", str(folder / "keys")]
    command = [sys.executable, "-m", "trt_nvfp4.builder.cli.umbrella", "serve", str(folder), *options]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    assert process.stderr is not None
    log: list[dict[str, Any]] = []
    for line in process.stderr:
        log.append(json.loads(line))
        if log[-1]["event"] == "ready":
            break
    reader = threading.Thread(target=lambda: log.extend(map(json.loads, process.stderr or ())))
    reader.start()
    try:
        yield Server(process, int(log[-1]["address"].rpartition(":")[2]), log)
    finally:
        process.terminate()
        process.wait(60)
        reader.join()

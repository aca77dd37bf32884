"""Two replicas on a local Ray, one of whose servers is killed under load. Needs `pip install 'ray[serve]'`."""

import http.client
import json
import shutil
import threading
import time
from pathlib import Path

import pytest

from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.model.decoder_contract import CacheOptions

ray = pytest.importorskip("ray")
pytest.importorskip("ray.serve")
psutil = pytest.importorskip("psutil")

pytestmark = pytest.mark.nightly

ROOT = Path(__file__).parents[2]
MODEL, PORT, SECONDS, KILL_AFTER = ROOT / "tests" / "trained_models" / "llama", 18556, 24, 6


def asked(stream: bool) -> str:
    """The status of a request, or "cut off"."""
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=60)
    body = {"prompt": "def", "max_tokens": 40, "temperature": 0, "ignore_eos": True, "stream": stream}
    try:
        connection.request("POST", "/v1/completions", json.dumps(body), {"content-type": "application/json"})
        answer = connection.getresponse()
        text = answer.read()
    except (http.client.HTTPException, ConnectionError):
        return "cut off"
    finally:
        connection.close()
    if answer.status == 502:
        assert "the replica has ended" in json.loads(text)["error"]["message"]
    return "cut off" if stream and answer.status == 200 and b"[DONE]" not in text else str(answer.status)


def test_only_what_a_killed_server_was_answering_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = export(MODEL, tmp_path / "llama.onnx", "generate", CacheOptions(max_batch=8))
    shutil.copytree(MODEL, tmp_path / "tokenizer", ignore=shutil.ignore_patterns("*.safetensors"))
    for name, value in {"MODEL": model, "GPUS": 0, "PROXY": f"http://127.0.0.1:{PORT}"}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(str(ROOT / "examples" / "serving"))
    monkeypatch.setenv("PYTHONPATH", str(ROOT / "examples" / "serving"))
    ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False, _node_ip_address="127.0.0.1")
    try:
        ray.serve.start(http_options={"host": "127.0.0.1", "port": PORT})
        import ray_app

        ray.serve.run(ray_app.app)
        seen: list[tuple[float, str]] = []
        until = time.monotonic() + SECONDS

        def client() -> None:
            while (begun := time.monotonic()) < until:
                seen.append((begun, asked(stream=len(seen) % 2 == 0)))

        clients = [threading.Thread(target=client) for _ in range(8)]
        for each in clients:
            each.start()
        time.sleep(KILL_AFTER)
        servers = [each for each in psutil.process_iter(["cmdline"]) if str(model) in (each.info["cmdline"] or ())]
        servers[0].kill()
        killed = time.monotonic()
        for each in clients:
            each.join()
    finally:
        ray.serve.shutdown()
        ray.shutdown()
    assert len(servers) == 2
    failed = [(begun, what) for begun, what in seen if what != "200"]
    assert {what for _, what in failed} <= {"502", "cut off"}
    assert all(begun < killed for begun, _ in failed)
    assert 0 < len(failed) <= len(clients)
    assert sum(begun > killed for begun, _ in seen) > 10

"""`trt-nvfp4 serve` in a process of its own, by OpenAI's client and by clients that do not keep to the protocol."""

import json
import re
import signal
import socket
from typing import Any

import psutil
import pytest
import torch

from tests.builder.serve.conftest import MODEL, Server

transformers = pytest.importorskip("transformers")
openai = pytest.importorskip("openai")

pytestmark = pytest.mark.slow

PROMPT = "Return a new list of the"
TOOL = {
    "type": "function",
    "function": {
        "name": "add",
        "parameters": {
            "type": "object",
            "properties": {"a": {"type": "integer"}, "b": {"enum": ["x", "y"]}},
            "required": ["a", "b"],
            "additionalProperties": False,
        },
    },
}


@pytest.fixture(scope="module")
def original() -> tuple[Any, Any]:
    tokenizer = transformers.AutoTokenizer.from_pretrained(MODEL)
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL, dtype=torch.float32), tokenizer


def continued(original: tuple[Any, Any], text: str, count: int) -> str:
    model, tokenizer = original
    ids = torch.tensor([tokenizer(text)["input_ids"]])
    found = model.generate(ids, max_new_tokens=count, do_sample=False, pad_token_id=0)
    return str(tokenizer.decode(found[0, ids.shape[1] :], skip_special_tokens=True))


def test_texts_are_those_of_transformers(server: Server, original: tuple[Any, Any]) -> None:
    client = server.client()
    expected = continued(original, PROMPT, 12)
    (model,) = client.models.list().data
    whole = client.completions.create(model=model.id, prompt=[PROMPT, "def"], max_tokens=12, temperature=0, n=2)
    assert [choice.text for choice in whole.choices[:2]] == [expected] * 2
    assert [choice.text for choice in whole.choices[2:]] == [continued(original, "def", 12)] * 2
    assert whole.usage.completion_tokens == 48
    chunks = list(client.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == expected
    assert [chunk.choices[0].finish_reason for chunk in chunks[-2:]] == [None, "length"]
    end = expected[8:11]
    stopped = client.completions.create(model="llama", prompt=PROMPT, max_tokens=12, temperature=0, stop=[end])
    assert (stopped.choices[0].text, stopped.choices[0].finish_reason) == (expected[: expected.find(end)], "stop")
    messages = [{"role": "system", "content": "a"}, {"role": "user", "content": [{"type": "text", "text": "def"}]}]
    text = continued(original, "system: a\nuser: def\nassistant:", 9)
    chat = client.chat.completions.create(model="llama", messages=messages, max_tokens=9, temperature=0)
    assert (chat.choices[0].message.content, chat.choices[0].message.role) == (text, "assistant")
    usage = {"include_usage": True}
    stream = client.chat.completions.create(
        model="llama", messages=messages, max_tokens=9, temperature=0, stream=True, stream_options=usage
    )
    *pieces, last = list(stream)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == text
    assert last.usage.completion_tokens == 9


def test_scores_are_those_of_transformers(server: Server, original: tuple[Any, Any]) -> None:
    model, tokenizer = original
    given = {"model": "llama", "prompt": PROMPT, "max_tokens": 1, "temperature": 0}
    found = server.client().completions.create(**given, logprobs=2, echo=True).choices[0].logprobs
    ids = tokenizer(PROMPT)["input_ids"]
    with torch.no_grad():
        expected = model(torch.tensor([ids])).logits[0].log_softmax(-1)
    assert found.token_logprobs[0] is None
    assert found.token_logprobs[1:-1] == pytest.approx(expected[range(len(ids) - 1), ids[1:]].tolist(), abs=1e-3)
    assert [max(top.values()) for top in found.top_logprobs[1:]] == pytest.approx(expected.amax(-1).tolist(), abs=1e-3)
    assert "".join(found.tokens[:-1]) == PROMPT
    messages = [{"role": "user", "content": "def"}]
    chat = server.client().chat.completions.create(
        model="llama", messages=messages, max_tokens=2, temperature=0, logprobs=True, top_logprobs=1
    )
    scores = chat.choices[0].logprobs.content
    assert [score.logprob for score in scores] == [score.top_logprobs[0].logprob for score in scores]


def test_sampling_follows_its_seed(server: Server) -> None:
    def texts(**more: Any) -> list[str]:
        found = server.client().completions.create(model="llama", prompt=PROMPT, max_tokens=20, n=3, **more)
        return [choice.text for choice in found.choices]

    assert texts(seed=5) == texts(seed=5)
    assert len(set(texts(seed=5) + texts(seed=6) + texts())) == 9
    assert len(set(texts(temperature=0, frequency_penalty=2.0))) == 1
    assert texts(seed=5, top_p=1e-6) == texts(temperature=0)


def test_text_follows_a_schema_and_calls_follow_their_functions(server: Server) -> None:
    client, messages = server.client(), [{"role": "user", "content": "def"}]
    schema = TOOL["function"]["parameters"]  # type: ignore[index]
    wanted = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    chat = client.chat.completions.create(
        model="llama", messages=messages, max_tokens=60, response_format=wanted, seed=1
    )
    assert json.loads(chat.choices[0].message.content).keys() == {"a", "b"}
    assert chat.choices[0].finish_reason == "stop"
    for choice in ("required", {"type": "function", "function": {"name": "add"}}):
        chat = client.chat.completions.create(
            model="llama", messages=messages, tools=[TOOL], tool_choice=choice, max_tokens=150, temperature=0
        )
        (call, *_) = chat.choices[0].message.tool_calls
        assert call.function.name == "add"
        assert json.loads(call.function.arguments).keys() == {"a", "b"}
        assert chat.choices[0].finish_reason == "tool_calls"
    answered = [
        *messages,
        {"role": "assistant", "tool_calls": [call.model_dump()]},
        {"role": "tool", "tool_call_id": call.id, "content": "3"},
    ]
    streamed = list(
        client.chat.completions.create(
            model="llama",
            messages=answered,
            tools=[TOOL],
            tool_choice="required",
            max_tokens=150,
            temperature=0,
            stream=True,
        )
    )
    assert streamed[-1].choices[0].delta.tool_calls[0].function.name == "add"


@pytest.mark.parametrize(
    ("body", "status", "message"),
    [
        (b"{", 400, "JSON"),
        (b'{"prompt": "\xff"}', 400, "JSON"),
        (b'{"prompt": "a", "max_tokens": 1e99}', 400, "max_tokens"),
        (b'{"prompt": "a", "temperature": NaN}', 400, "temperature"),
        (b'{"prompt": "a", "nonsense": 1}', 400, "nonsense"),
        (b'{"prompt": [5000]}', 400, "token 5000"),
        (b'{"prompt": ""}', 400, "0 tokens"),
        (b'{"prompt": "a", "model": "other"}', 404, "the model llama only"),
        (b'{"prompt": "' + b"word " * 1000 + b'"}', 400, "expected 1 to 256"),
        (b'{"prompt": "' + b"a" * (1 << 20) + b'"}', 413, "more than 1048576 bytes"),
        (b"[" * 100_000, 400, "JSON"),
    ],
)
def test_what_cannot_be_answered(server: Server, body: bytes, status: int, message: str) -> None:
    found, answer = server.post(body)
    assert found == status
    assert message in answer["error"]["message"]


def test_schemas_that_cannot_be_followed(server: Server) -> None:
    for schema in (
        {"type": "nonsense"},
        {"$ref": "http://127.0.0.1/x"},
        {"minimum": 2, "maximum": 1, "type": "integer"},
    ):
        body = {"prompt": "a", "response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}
        status, answer = server.post(json.dumps(body).encode())
        assert (status, "JSON schema" in answer["error"]["message"]) == (400, True), answer


def test_keys_limits_and_routes(server: Server) -> None:
    with pytest.raises(openai.AuthenticationError):
        server.client("third").models.list()
    with pytest.raises(openai.InternalServerError, match="deadline"):
        server.client().completions.create(
            model="llama", prompt="a", max_tokens=200, extra_headers={"X-Request-Timeout": "0.001"}
        )
    assert server.post(b"", "/v1/nothing")[0] == 404
    assert json.loads(server.get("/health")) == {"status": "ok"}
    assert re.search(r'requests_total\{path="/v1/completions",status="504"\} 1.0', server.get("/metrics"))
    page = server.get("/")
    assert "<script" in page
    assert "http" not in page.replace("http-equiv", "")  # nothing from elsewhere


def test_a_client_that_goes_makes_room(server: Server) -> None:
    for _ in range(8):  # more than there are slots
        raw = socket.create_connection(("127.0.0.1", server.port))
        body = json.dumps({"prompt": "def", "max_tokens": 250, "ignore_eos": True, "stream": True}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: a\r\nAuthorization: Bearer first\r\nContent-Length: {len(body)}"
        raw.sendall(f"{head}\r\n\r\n".encode() + body)
        raw.recv(1)
        raw.close()
    assert server.client().completions.create(model="llama", prompt="def", max_tokens=1).choices
    metrics = server.get("/metrics")
    while "running_requests 0.0" not in metrics:  # the test's time limit ends it
        metrics = server.get("/metrics")


def test_a_process_that_reads_prompts_may_end(server: Server) -> None:
    for process in psutil.Process(server.process.pid).children():
        if "spawn_main" in " ".join(process.cmdline()):
            process.kill()
    ask = server.client().completions.create
    with pytest.raises(openai.InternalServerError, match="started again"):
        ask(model="llama", prompt="def", max_tokens=1)
    assert ask(model="llama", prompt="def", max_tokens=1).choices


def test_sigterm_lets_answers_end(server: Server, original: tuple[Any, Any]) -> None:
    """The last test: the server ends."""
    given = {"model": "llama", "prompt": PROMPT, "max_tokens": 100, "temperature": 0}
    stream = server.client().completions.create(**given, stream=True)
    text = next(stream).choices[0].text
    server.process.send_signal(signal.SIGTERM)
    text += "".join(chunk.choices[0].text for chunk in stream)
    assert text == continued(original, PROMPT, 100)
    assert server.process.wait(60) == 0
    assert [line["event"] for line in server.log][-3:] == ["stopping", "request", "stopped"]

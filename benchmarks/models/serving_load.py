"""Load and nonsense for a server: nothing may be lost, wrong, slow to others, or grow.

    python -m benchmarks.models.serving_load --seconds 600 --clients 64 --nonsense 10000 --seed 7

starts `trt-nvfp4 serve` on the trained Llama. Clients come at random, with prompts and answers of random lengths, and
some go early; each greedy text is compared with that of a lone run. Then broken bodies follow, images
among them. Records what happened, and exits with 1 where something was wrong.
"""

import argparse
import asyncio
import json
import os
import platform
import random
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil

from benchmarks.harness import HERE, command, record
from benchmarks.models.server import served
from trt_nvfp4.builder.export.huggingface import export
from trt_nvfp4.builder.generate import Generator
from trt_nvfp4.builder.generate.tokenizer import Tokenizer
from trt_nvfp4.builder.model.decoder_contract import CacheOptions
from trt_nvfp4.common.replacing import scratch

TESTS = HERE.parent / "tests"
MODEL = TESTS / "trained_models" / "llama"
PROMPTS, LONGEST_TEXT, CAPACITY = 40, 40, 256
# Rounding decides between two tokens whose log probabilities differ by less.
TIE = 1e-3


def _seen(url: str) -> list[Any]:
    return [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": url}}]}]


VALUES: list[Any] = [
    *(None, True, 0, -1, 1e308, -1e-308, 1 << 70, "", "\x00", "\ud800", "a" * 5000, [], {}, [[]], [None], [1, "a"]),
    *({"type": "json_schema"}, {"type": "object", "pattern": "(a+)+$"}, [{"role": "user", "content": "a"}], [2**31]),
    *map(
        _seen, ("http://127.0.0.1/a.png", "data:image/png;base64,", "data:image/png;base64,iVBORw0KGgo=", "data:,a", "")
    ),
]
FIELDS = (
    *("prompt", "messages", "max_tokens", "temperature", "top_p", "top_k", "seed", "stop", "n", "stream", "logprobs"),
    *("echo", "response_format", "tools", "tool_choice", "presence_penalty", "stream_options", "model", "nonsense"),
)


class Prompts:
    """Prompts, and the texts that a lone run continues them with."""

    def __init__(self, model: Path, seed: int) -> None:
        text, random_ = (TESTS / "trained_models" / "text" / "held_out.txt").read_text(), random.Random(seed)
        tokenizer = Tokenizer(MODEL)
        starts = [random_.randrange(len(text) - 600) for _ in range(PROMPTS)]
        ids = [tokenizer.encode(text[at : at + 600]) for at in starts]
        self.full = ids[0][: CAPACITY - 1]
        self.prompts = [tokens[: random_.randint(1, 190)] for tokens in ids]
        with Generator(model, tokenizer) as generator:
            found = [
                generator.generate([prompt], max_new_tokens=LONGEST_TEXT, stop=["\0"]).generations[0].token_ids
                for prompt in self.prompts
            ]
        self.texts = [[tokenizer.decode(tokens[:count]) for count in range(LONGEST_TEXT + 1)] for tokens in found]


async def client(
    prompts: Prompts, ask: Any, until: float, random_: random.Random, seen: Counter[str], gaps: list[float]
) -> None:
    """Ask again and again; `gaps` gets the seconds between two tokens."""
    while time.monotonic() < until:
        await asyncio.sleep(random_.expovariate(2.0))
        number, count = random_.randrange(PROMPTS), random_.randint(1, LONGEST_TEXT)
        goes_after = random_.randint(0, count) if random_.random() < 0.2 else None
        text, last, pieces = "", 0.0, 0
        given = {
            "prompt": prompts.prompts[number],
            "max_tokens": count,
            "temperature": 0,
            "extra_body": {"ignore_eos": True},
        }
        try:
            async with await ask(model="llama", stream=True, **given) as stream:
                async for chunk in stream:
                    now = time.perf_counter()
                    gaps += [now - last] if pieces else []
                    text, last, pieces = text + chunk.choices[0].text, now, pieces + 1
                    if pieces == goes_after:
                        break
        except openai.RateLimitError:
            seen["refused for now"] += 1
            continue
        if goes_after is not None and pieces == goes_after:
            seen["gone early"] += 1
        elif text == prompts.texts[number][count]:
            seen["right"] += 1
        else:
            seen["right but for a tie" if await is_tie(prompts, ask, number, count, text) else "wrong"] += 1


async def is_tie(prompts: Prompts, ask: Any, number: int, count: int, text: str) -> bool:
    """Whether, where the texts part, both tokens are equally likely."""
    whole = prompts.texts[number]
    place = next(at for at in range(count) if not text.startswith(whole[at + 1]))
    ids = (
        await ask(model="llama", prompt=prompts.prompts[number], max_tokens=place + 1, temperature=0, logprobs=2)
    ).choices[0]
    likely = sorted(ids.logprobs.top_logprobs[place].values())
    return bool(likely[-1] - likely[-2] < TIE)


async def beside_full_prompts(prompts: Prompts, ask: Any) -> dict[str, float]:
    """Seconds between tokens of four texts: without others, and while prompts of the full capacity arrive."""
    found: dict[str, float] = {}
    for name, others in (("alone", 0), ("beside", 6)):
        gaps: list[float] = []

        async def listen(gaps: list[float] = gaps) -> None:
            last = 0.0
            given = {
                "prompt": [5],
                "max_tokens": 200,
                "temperature": 1,
                "stream": True,
                "extra_body": {"ignore_eos": True},
            }
            async for _ in await ask(model="llama", **given):
                now = time.perf_counter()
                gaps += [now - last] if last else []
                last = now

        tasks = [asyncio.create_task(listen()) for _ in range(4)]
        for number in range(others):
            await asyncio.sleep(0.1)
            prompt = [number + 1, *prompts.full[1:]]
            tasks.append(asyncio.create_task(ask(model="llama", prompt=prompt, max_tokens=1)))
        await asyncio.gather(*tasks)
        found |= {f"{name}, median": float(np.median(gaps)), f"{name}, p99": float(np.quantile(gaps, 0.99))}
    return found


async def nonsense(port: int, count: int, random_: random.Random, seen: Counter[str]) -> None:
    """Broken bodies, slow ones, and clients that go in the middle; counts the statuses."""
    gate = asyncio.Semaphore(32)

    async def one(number: int) -> None:
        path = random_.choice(["/v1/completions", "/v1/chat/completions"])
        body = (
            {"prompt": "a", "max_tokens": 2}
            if path == "/v1/completions"
            else {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}
        )
        body |= {random_.choice(FIELDS): random_.choice(VALUES) for _ in range(random_.randint(0, 3))}
        text = bytearray(json.dumps(body).encode())
        for _ in range(random_.choice([0, 0, 1, 5])):
            text[random_.randrange(len(text))] = random_.randrange(256)
        claimed = len(text) + random_.choice([0] * 30 + [5])
        head = f"POST {path} HTTP/1.1\r\nHost: a\r\nConnection: close\r\nContent-Length: {claimed}\r\n\r\n".encode()
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(head + text[: len(text) // 2])
            await asyncio.sleep(random_.choice([0, 0, 0.05]))
            writer.write(text[len(text) // 2 :])
            if claimed != len(text) or number % 50 == 0:
                seen["gone"] += 1
            else:
                status = (await asyncio.wait_for(reader.readline(), 60)).decode().split(" ")[1]
                seen[status] += 1
                await reader.read()
            writer.close()

    await asyncio.gather(*(one(number) for number in range(count)))


async def run(options: argparse.Namespace, prompts: Prompts, port: int, memory: Any) -> dict[str, Any]:
    api = openai.AsyncOpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="-", max_retries=0, timeout=300)
    ask, random_, seen, gaps = api.completions.create, random.Random(options.seed), Counter[str](), list[float]()
    found: dict[str, Any] = {"seconds between tokens": await beside_full_prompts(prompts, ask)}
    until = time.monotonic() + options.seconds
    clients = [
        client(prompts, ask, until, random.Random(f"{options.seed} {n}"), seen, gaps) for n in range(options.clients)
    ]
    tasks = asyncio.gather(*clients)
    sizes = []
    while not tasks.done():
        await asyncio.sleep(min(10.0, options.seconds / 6))
        sizes.append(memory())
    await tasks
    statuses = Counter[str]()
    await nonsense(port, options.nonsense, random_, statuses)
    found |= {"texts": seen, "statuses": statuses, "MB while texts ran": sizes, "MB after nonsense": memory()}
    found["p99 of seconds between tokens under load"] = float(np.quantile(gaps, 0.99))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("seconds", 600), ("clients", 64), ("nonsense", 10_000), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--out", type=Path, default=HERE / "results" / "models" / "serving_load.json")
    options = parser.parse_args()
    with scratch(None) as folder:
        model = export(MODEL, folder / "llama.onnx", "generate", CacheOptions(max_batch=8))
        prompts, log = Prompts(model, options.seed), folder / "log"
        with served(model, log, "--tokenizer", MODEL, "--name", "llama") as server:
            memory = psutil.Process(server.process.pid).memory_info
            found = asyncio.run(run(options, prompts, server.port, lambda: memory().rss >> 20))
            server.process.terminate()
            found["exit code"] = server.process.wait(60)
        found["failures"] = [line for line in log.read_text().splitlines() if not line.startswith("{")][-30:]
    print(json.dumps(found, indent=2))
    setting = {"cpu": platform.processor() or platform.machine(), "cores": os.cpu_count(), "command": command()}
    record(options.out, {"environment": setting, **found})
    return int(bool(found["texts"]["wrong"] or found["statuses"]["500"] or found["exit code"]))


if __name__ == "__main__":
    sys.exit(main())

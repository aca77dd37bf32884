"""Every class of a causal language model in transformers, tiny and with random weights: tokens over caches in ONNX.

    python tests/builder/export/family_sweep.py [--jobs 8] [--seconds 300] [--out RECORD.json] [NAME ...]

Each class runs in a process of its own. It must generate transformers' greedy tokens (FP32, three prompts of different
lengths, ONNX Runtime), or be refused with one message; anything else is a failure. NAME: a class of transformers or a
variant of `any_causal_lm.VARIANTS`; default: all. RECORD.json keeps what earlier runs with the same versions found. Not
a test: all of them take hours of CPU time.
"""

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from sweep_record import recorded

from onnx_models.any_causal_lm import VARIANTS, made

CAPACITY, PROMPTS = 64, (5, 9, 3)
GOOD = ("equal", "near tie", "refused")


def classes() -> list[str]:
    import transformers
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    named = [name for name in dir(transformers) if name.endswith(("ForCausalLM", "LMHeadModel"))]
    known = {name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() if "Conditional" not in name}
    return sorted({*known, *named} - {"AutoModelForCausalLM"})


def outcome(name: str, folder: Path) -> tuple[str, str]:
    """How the class ends, and what was said."""
    import numpy as np
    import onnx
    import torch
    from transformers import GenerationConfig

    from onnx_models.cached_greedy import NEW_TOKENS, greedy
    from trt_nvfp4.builder.errors import BuilderError
    from trt_nvfp4.builder.export.huggingface import export
    from trt_nvfp4.builder.model.decoder_contract import CacheOptions, decoder_of

    try:
        model = made(name)
        model.save_pretrained(folder / name)
    except Exception as error:
        return "not made", f"{type(error).__name__}: {str(error)[:400]}"
    try:
        path = export(folder / name, folder / "m.onnx", "generate", CacheOptions(CAPACITY, max_batch=None))
    except BuilderError as error:
        return "refused", str(error).replace(str(folder), "")
    decoder = decoder_of(onnx.load(path, load_external_data=False))
    assert decoder is not None
    prompts = [torch.randint(3, 100, (length,)).tolist() for length in PROMPTS]
    with contextlib.suppress(ValueError):
        model.set_attn_implementation("eager")
    # Without an end of text, and tokens that are forced or forbidden: some would never be compared.
    model.generation_config, model.config.eos_token_id = GenerationConfig(), None
    batches = [[prompt] for prompt in prompts] if decoder.max_batch == 1 else [prompts]
    found = [tokens for batch in batches for tokens in greedy(path, batch, padding=7)]
    said = []
    for prompt, tokens in zip(prompts, found, strict=True):
        ids = torch.tensor([prompt])
        text = model.generate(ids, max_new_tokens=NEW_TOKENS, do_sample=False, pad_token_id=0)[
            0, len(prompt) :
        ].tolist()
        if text == tokens:
            continue
        first = int(np.argmax(np.array(text) != np.array(tokens)))
        with torch.no_grad():
            logits = model(input_ids=torch.tensor([prompt + text[:first]]), use_cache=False).logits[0, -1].double()
        gap = float(logits[text[first]] - logits[tokens[first]]) / float(logits.std())
        said.append((gap, f"token {first} of the prompt of {len(prompt)}: {gap:.1e} standard deviations apart"))
    if not said:
        single = ", one sequence at a time" if decoder.max_batch == 1 else ""
        return "equal", f"{len(set(np.ravel(found)))} different tokens{single}"
    worst = max(said)
    return ("near tie" if abs(worst[0]) < 1e-3 else "different"), worst[1]


def one(name: str) -> dict[str, Any]:
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        try:
            how, said = outcome(name, Path(folder))
        except Exception:
            how, said = "raised", traceback.format_exc()[-3000:]
    return {"name": name, "how": how, "said": said, "seconds": round(time.monotonic() - begun, 1)}


def run(name: str, seconds: float) -> dict[str, Any]:
    """`one` in a process of its own."""
    command = [sys.executable, __file__, "--one", name]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}
    try:
        ran = subprocess.run(command, capture_output=True, text=True, timeout=seconds, env=environment)
    except subprocess.TimeoutExpired:
        return {"name": name, "how": "too long", "said": f"over {seconds:.0f} s", "seconds": seconds}
    if ran.returncode:
        return {"name": name, "how": "died", "said": f"{ran.returncode}: {ran.stderr[-2000:]}", "seconds": 0.0}
    result: dict[str, Any] = json.loads(ran.stdout.splitlines()[-1])
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=300, help="for each class")
    parser.add_argument("--out", type=Path, help="written as each ends")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    parser.add_argument("names", nargs="*")
    options = parser.parse_args()
    if options.one:
        print(json.dumps(one(options.one)))
        return 0
    counts: Counter[str] = Counter()
    command = "python tests/builder/export/family_sweep.py --out RECORD.json NAME ..."
    record = recorded(options.out, command, ("transformers", "torch", "onnx", "onnxruntime"))
    with ThreadPoolExecutor(options.jobs) as pool:
        names = options.names or [*VARIANTS, *classes()]
        for future in as_completed([pool.submit(run, name, options.seconds) for name in names]):
            result = future.result()
            counts[result["how"]] += 1
            print(
                f"{result['name']:36} {result['seconds']:6.1f} s  {result['how']}: {result['said'][-300:]}", flush=True
            )
            if options.out:
                record["outcomes"][result.pop("name")] = result
                options.out.write_text(json.dumps(record, indent=1, sort_keys=True) + "\n")
    print(dict(counts))
    return 0 if counts.keys() <= set(GOOD) else 1


if __name__ == "__main__":
    sys.exit(main())

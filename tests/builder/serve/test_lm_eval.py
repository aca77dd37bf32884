"""EleutherAI's lm-evaluation-harness, where it is installed (`pip install 'lm_eval[api,hf]'`): its scores through the
server are those of the model in transformers."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.builder.serve.conftest import MODEL, Server

pytest.importorskip("lm_eval")

pytestmark = pytest.mark.nightly

# Questions with four answers, from lines that the model was trained on; answers end in other lines' endings.
TASK = """
task: continued_lines
dataset_path: json
dataset_kwargs: {data_files: {test: %s}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{begins}}"
doc_to_choice: "{{ends}}"
doc_to_target: right
target_delimiter: ""
metric_list: [{metric: acc, aggregation: mean}, {metric: acc_norm, aggregation: mean}]
"""


def written_task(folder: Path, rng: np.random.Generator) -> None:
    lines = (MODEL.parent / "text" / "train.txt").read_text().splitlines()
    lines = [line.strip() for line in lines if len(line.split()) == 12]
    chosen = [line.split() for line in rng.choice(lines, 24, replace=False)]
    with (folder / "lines.jsonl").open("w") as file:
        for at, words in enumerate(chosen):
            others = [chosen[(at + step) % len(chosen)] for step in range(4)]
            ends = [" " + " ".join(other[8:]) for other in others]
            order = rng.permutation(4)
            document = {
                "begins": " ".join(words[:8]),
                "ends": [ends[k] for k in order],
                "right": int(np.flatnonzero(order == 0)[0]),
            }
            file.write(json.dumps(document) + "\n")
    (folder / "continued_lines.yaml").write_text(TASK % json.dumps(str(folder / "lines.jsonl")))


def scored(folder: Path, name: str, model: str, arguments: str) -> tuple[dict[str, Any], list[list[float]]]:
    """The metrics, and the log-likelihoods of every answer."""
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--model_args", arguments]
    command += ["--device", "cpu", "--tasks", "continued_lines", "--include_path", folder]
    command += ["--output_path", folder / name, "--log_samples"]
    environment = {"HF_HOME": str(folder / "cache"), "HF_HUB_OFFLINE": "1", "OPENAI_API_KEY": "second"}
    done = subprocess.run(list(map(str, command)), env=os.environ | environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    [results] = (folder / name).rglob("results_*.json")
    [samples] = (folder / name).rglob("samples_*.jsonl")
    rows = [json.loads(line) for line in samples.read_text().splitlines()]
    rows.sort(key=lambda row: row["doc_id"])
    likelihoods = [
        [float(answer[0][0] if isinstance(answer[0], list) else answer[0]) for answer in row["resps"]] for row in rows
    ]
    return json.loads(results.read_text())["results"]["continued_lines"], likelihoods


def test_scores_are_those_of_transformers(server: Server, tmp_path: Path, rng: np.random.Generator) -> None:
    written_task(tmp_path, rng)
    original, expected = scored(tmp_path, "original", "hf", f"pretrained={MODEL},dtype=float32")
    address = f"http://127.0.0.1:{server.port}/v1/completions"
    options = f"model=llama,base_url={address},tokenizer={MODEL},tokenizer_backend=huggingface,num_concurrent=4"
    served, found = scored(tmp_path, "served", "local-completions", options)
    assert np.shape(found) == (24, 4)
    assert np.allclose(found, expected, atol=1e-2)
    assert {k: v for k, v in served.items() if k.startswith("acc")} == {
        k: v for k, v in original.items() if k.startswith("acc")
    }
    assert served["acc,none"] > 0.25

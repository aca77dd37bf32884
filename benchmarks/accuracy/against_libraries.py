"""The recipes against another library's: same models, calibration text and metrics, in one run on the CPU.

    pip install nvidia-modelopt && python -m benchmarks.accuracy.against_libraries modelopt
    pip install llmcompressor && python -m benchmarks.accuracy.against_libraries llmcompressor

The second pins an older transformers than the project does: give it an environment of its own.

Into results/accuracy/{modelopt,llmcompressor}.json; `libraries` says what is particular to each. Seconds are those of
the processor, one thread, from the trained model to the quantized one, calibration included. Rows that the output
already has are kept: an interrupted run goes on.
"""

import argparse
import importlib
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks.accuracy.libraries.library import Library
from benchmarks.accuracy.quantizing import fold, input_statistics, quantize_weights, quantized_activations
from benchmarks.accuracy.subjects import SUBJECTS, Metrics
from trt_nvfp4.calibration import recipes
from trt_nvfp4.common.replacing import replacing

RESULTS = Path(__file__).resolve().parents[1] / "results" / "accuracy"
LIBRARIES = ("modelopt", "llmcompressor")


def ours(name: str, spelling: str) -> dict[str, Any]:
    recipe = recipes.parse(spelling)
    subject = SUBJECTS[name]()
    started = time.process_time()
    statistics = fold(subject, recipe, input_statistics(subject, recipe.needs))
    quantize_weights(subject, recipe, statistics)
    seconds = time.process_time() - started
    w4a16 = subject.evaluate()
    with quantized_activations(subject, statistics):
        return {"W4A16": w4a16, "W4A4": subject.evaluate(), "seconds": seconds}


def theirs(name: str, library: Library, configuration: object) -> dict[str, Any]:
    subject = SUBJECTS[name]()
    started = time.process_time()
    library.quantize(subject, configuration)
    seconds = time.process_time() - started
    w4a4 = subject.evaluate()
    library.keep_activations(subject)
    return {"W4A16": subject.evaluate(), "W4A4": w4a4, "seconds": seconds}


def attempt(measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """A recipe that one side lacks here is recorded with its reason."""
    try:
        return measure()
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"[:300]}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=LIBRARIES)
    parser.add_argument("--subjects", nargs="+", choices=SUBJECTS, default=["llama", "qwen3_moe", "minilm"])
    parser.add_argument("--recipes", nargs="+", help="by what they do; all unless given")
    parser.add_argument("--output", type=Path)
    arguments = parser.parse_args()
    output = arguments.output or RESULTS / f"{arguments.library}.json"
    torch.set_num_threads(1)
    module = importlib.import_module(f"benchmarks.accuracy.libraries.with_{arguments.library}")
    library: Library = module.library()
    results: dict[str, Any] = {"library": library.name, "version": library.version, "torch": torch.__version__}
    results |= {"originals": {}, "rows": []}
    if output.exists():
        recorded = json.loads(output.read_text())
        if recorded["version"] == library.version:
            results["originals"], results["rows"] = recorded["originals"], recorded["rows"]
    known = {(row["subject"], row["recipe"]) for row in results["rows"]}
    for name in arguments.subjects:
        original: Metrics = SUBJECTS[name]().evaluate()
        results["originals"][name] = original
        for what in arguments.recipes or library.recipes:
            if (name, what) in known:
                continue
            spelling, configuration = library.recipes[what]
            row = {
                "subject": name,
                "recipe": what,
                "ours": attempt(lambda name=name, spelling=spelling: ours(name, spelling)),
                "theirs": attempt(lambda name=name, how=configuration: theirs(name, library, how)),
            }
            results["rows"].append(row)
            print(json.dumps(row), flush=True)
            with replacing(output) as partial:
                partial.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()

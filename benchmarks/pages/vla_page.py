"""Prints the table of actions in docs/how_to/vla.md, from the recorded run of vla_actions.py."""

from __future__ import annotations

from collections.abc import Iterable

from benchmarks.pages.records import load


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    titles = list(heads)
    lines = [titles, ["---"] * len(titles), *(list(row) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def actions_table() -> str:
    """Errors of the actions against BF16's, over the observations."""
    rows, found = [], load("vla_actions")
    for run in found["runs"]:
        errors, cosines = run["relative_errors"], run["cosines"]
        of_change = max(error / change for error, change in zip(errors, found["changes"], strict=True))
        shown = f"{sum(errors) / len(errors):.2%}", f"{max(errors):.2%}", f"{of_change:.2%}", f"{min(cosines):.5f}"
        replaced = (sum(n for kind, n in part.items() if kind != "keep") for part in run["decisions"].values())
        rows.append([run["name"], str(sum(replaced)), *shown])
    return table(
        ("MLPs", "plugins", "mean relative error", "largest", "largest, of the change", "smallest cosine"), rows
    )


def main() -> None:
    print(actions_table())


if __name__ == "__main__":
    main()

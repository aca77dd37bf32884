"""Prints the tables of docs/how_to/vla.md and robot_policies.md, from recorded runs of vla_*.py and policies.py."""

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


def builds_table() -> str:
    """Time and memory of each target's build."""
    rows = []
    for run in load("vla_build")["runs"]:
        sizes = (run[f"{what}_bytes"] / 1e9 for what in ("largest_process", "all_processes", "written"))
        times = (f"{run[f'{what}_s'] / 60:.1f}" for what in ("wall", "cpu"))
        rows.append([f"`{run['target']}`", run["made"], *times, *(f"{size:.1f}" for size in sizes)])
    heads = ("target", "made", "minutes", "CPU minutes", "largest process, GB", "all processes, GB", "written, GB")
    return table(heads, rows)


def parts_table(target: str) -> str:
    """Predicted milliseconds of each part on a target, as planned and in other formats."""
    (run,) = (run for run in load("vla_build")["runs"] if run["target"] == target)
    formats = list(run["parts"][0]["milliseconds"])
    rows = []
    for part in run["parts"]:
        weights = f"{part['before'] / 1e6:.0f} -> {part['after'] / 1e6:.0f}"
        tokens = ", ".join(map(str, part["rows"]))
        times = (part["planned_ms"], *(part["milliseconds"][name] for name in formats))
        shown = (f"{time:.2f}" for time in times)
        rows.append([f"`{part['part']}`", str(part["times"]), weights, tokens, ", ".join(part["kernels"]), *shown])
    sums = [sum(part["planned_ms"] for part in run["parts"])]
    sums += [sum(part["milliseconds"][name] for part in run["parts"]) for name in formats]
    rows.append(["sum", "", "", "", "", *(f"{time:.2f}" for time in sums)])
    return table(("part", "runs", "MB of weights", "rows", "kernels", "as planned", *formats), rows)


def policies_table() -> str:
    """Errors of policies against LeRobot's own chunk of actions."""
    rows = []
    for run in load("policies")["runs"]:
        shown = (str(run["steps"]), f"{run['export_error']:.1e}", str(run["nvfp4"]), f"{run['error']:.1e}")
        rows.append([f"`{run['type']}`", *shown, f"{run['cosine']:.5f}"])
    return table(("type", "steps", "error in float32", "NVFP4 subgraphs", "error as planned", "cosine"), rows)


def main() -> None:
    print(actions_table(), builds_table(), parts_table("thor"), policies_table(), sep="\n\n")


if __name__ == "__main__":
    main()

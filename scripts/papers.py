"""Count what the drafters of the papers draft and have accepted, on prompts of public tasks, with one loaded model.

    python scripts/papers.py --data PROMPTS --cells papers.jsonl          # counts; can be killed, and goes on
    python scripts/papers.py --cells papers.jsonl --table                 # the tables of docs/results/papers.md

A cell is a method with its options and control, a temperature and a prompt; each is a line of the file once it is
counted. Counts do not depend on how busy the machine is; seconds are the business of `foredraft bench run`.
"""

import argparse
import json
from collections import defaultdict
from pathlib import Path
from typing import Any

import foredraft
from foredraft.bench.tasks import load_tasks
from foredraft.engine.statistics import Statistics, add_up

TASKS = ("humaneval", "gsm8k", "mt_bench")
EESD: dict[str, dict[str, Any]] = {
    "Cali-TS": {"control": "cali_ts"},
    "Beta-TS": {"control": "beta_ts"},
    "adaptive threshold": {"control": "exit_threshold"},
    **{f"fixed {k}": {"nodes": k} for k in (4, 2, 3, 6, 1, 8, 10)},
}
"""What says how much EESD drafts, by its row."""


def cells(heads: dict[str, str]) -> dict[str, dict[str, Any]]:
    """Return the arguments of `Generator.use` by the row that they fill, the most telling first."""
    found: dict[str, dict[str, Any]] = {"plain": {"method": "none"}}
    for name in ("Cali-TS", "Beta-TS", "fixed 4"):
        found[f"EESD, {name}"] = {"method": "eesd", **EESD[name]}
    for method, name in (("draft_model", "SSD"), ("draft_tree", "TSD"), ("draft_graph", "GSD")):
        found[name] = {"method": method, "nodes": 8}
    found["Medusa"] = {"method": "medusa", "nodes": 8}
    found["EESD, tree"] = {"method": "eesd", "options": {"out_degree": 3}, "nodes": 8}
    layers = {"head": "none", "layers": 6}
    found["EESD, no exit layer, Beta-TS"] = {"method": "eesd", "options": layers, "control": "beta_ts"}
    for name, head in heads.items():
        found[f"EESD, {name}, Beta-TS"] = {"method": "eesd", "options": {"head": head}, "control": "beta_ts"}
    found |= {f"EESD, {name}": {"method": "eesd", **how} for name, how in EESD.items()}
    return found


def count(arguments: argparse.Namespace) -> None:
    """Count the cells that the file does not hold yet."""
    path, known = arguments.cells, set()
    if path.exists():
        known = {tuple(json.loads(line)["cell"]) for line in path.read_text().splitlines()}
    generator = foredraft.load("smollm2", method="none")
    prompts = load_tasks(TASKS, arguments.data, arguments.prompts)
    rows = cells(dict(each.split("=", 1) for each in arguments.head))
    with path.open("a") as file:
        for temperature in arguments.temperature:
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
            for row, how in rows.items():
                if arguments.row and row not in arguments.row:
                    continue
                left = [each for each in prompts if (row, temperature, each.task, each.number) not in known]
                if not left:
                    continue
                generator.use(**{"options": {}, **how})
                for prompt in left:
                    text = generator.generate(
                        prompt.prompt, max_new_tokens=arguments.tokens, seed=prompt.number, **sampling
                    )
                    cell = (row, temperature, prompt.task, prompt.number)
                    line = {"cell": cell, "ids": list(text.token_ids), "statistics": text.statistics.as_dict()}
                    file.write(json.dumps(line) + "\n")
                    file.flush()


def table(path: Path) -> None:
    """Print a table for each temperature, over the prompts that all of its rows have."""
    found: dict[float, dict[str, dict[tuple[str, int], Any]]] = defaultdict(lambda: defaultdict(dict))
    for line in map(json.loads, path.read_text().splitlines()):
        row, temperature, task, number = line["cell"]
        found[temperature][row][task, number] = line
    for temperature, rows in found.items():
        whole = max(map(len, rows.values()))
        print(f"\nT={temperature:g}, {whole} prompts\n\n| | tokens a step | v_d | r_d | HM | texts of plain decoding |")
        print("|---|---|---|---|---|---|")
        for row, lines in rows.items():
            if len(lines) < whole:
                continue
            total = add_up([_statistics(line["statistics"]) for line in lines.values()])
            same = sum(line["ids"] == rows["plain"][key]["ids"] for key, line in lines.items())
            print(
                f"| {row} | {total.tokens_per_target_step:.2f} | {total.draft_acceptance_rate:.2f} | "
                f"{total.drafted_share:.2f} | {100 * total.harmonic_mean:.1f} | {same} of {whole} |"
            )


def _statistics(counts: dict[str, Any]) -> Statistics:
    return Statistics(**{name: counts[name] for name in Statistics.__dataclass_fields__})


def main() -> None:
    """Count, or print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, help="the folder of the tasks' files")
    parser.add_argument("--cells", type=Path, required=True, help="the file of what was counted")
    parser.add_argument("--prompts", type=int, default=10, help="of each task")
    parser.add_argument("--tokens", type=int, default=128, help="of a text at most")
    parser.add_argument("--temperature", type=float, action="append", help="0 is greedy; may be given more than once")
    parser.add_argument("--head", action="append", default=[], help="ROW=FOLDER, a further EESD head to count")
    parser.add_argument("--row", action="append", help="count this row only; may be given more than once")
    parser.add_argument("--table", action="store_true", help="print what was counted")
    arguments = parser.parse_args()
    arguments.temperature = arguments.temperature or [0.0]
    if arguments.table:
        table(arguments.cells)
    else:
        count(arguments)


if __name__ == "__main__":
    main()

"""Measure the papers' drafters and plain decoding on prompts of public tasks, in one process.

    python scripts/papers.py --data PROMPTS --cells papers.jsonl          # can be killed and resumed
    python scripts/papers.py --cells papers.jsonl --table                 # the tables of docs/results/papers.md

A row is a method with its options and control. A cell is a row, a temperature and a prompt; each measured cell is a
line of the file. All rows write a prompt before the next prompt begins. Compile the models first: `foredraft compile
--method eesd`, `draft_model` and `layer_skip`.
"""

import argparse
import json
from collections import defaultdict
from fnmatch import filter as filter_names
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file

import foredraft
from foredraft.bench.tasks import load_tasks
from foredraft.control import StepCosts
from foredraft.engine.statistics import Statistics, add_up
from foredraft.model.head_files import CONFIG_FILE, IDS, SHIPPED, WEIGHTS_FILE, HeadCard, save_head

TASKS = ("humaneval", "gsm8k", "mt_bench")
CHAIN = {"out_degree": 1, "least_probability": 0.0, "levels": 10}  # as EESD drafts
ROWS: dict[str, dict[str, Any]] = {
    "plain": {"method": "none"},
    "EESD": {"method": "eesd"},
    **{
        f"EESD, chain, {name}": {"method": "eesd", "options": CHAIN, **control}
        for name, control in {
            "Cali-TS": {"control": "cali_ts"}, "Beta-TS": {"control": "beta_ts"},
            "adaptive threshold": {"control": "exit_threshold"}, "by costs": {"control": "measured"},
            **{f"fixed {k}": {"nodes": k} for k in range(1, 11)},
        }.items()
    },
    "EESD, tree of 7": {
        "method": "eesd", "options": {"least_probability": 0.3, "out_degree": 4}, "nodes": 7,
    },
    "EESD, no exit layer, Beta-TS": {
        "method": "eesd", "options": {"head": "none", "layers": 4, **CHAIN}, "control": "beta_ts",
    },
    "SSD": {"method": "draft_model"},
    "SSD, 8 nodes": {"method": "draft_model", "nodes": 8},
    "TSD": {"method": "draft_tree"},
    "TSD, 8 nodes": {"method": "draft_tree", "nodes": 8},
    "GSD": {"method": "draft_graph"},
    "GSD, 8 nodes": {"method": "draft_graph", "nodes": 8},
    "Medusa, 8 nodes": {"method": "medusa", "nodes": 8},
    "layer skipping": {"method": "layer_skip"},
    "lookahead": {"method": "lookahead"},
    "Adaptix, 16 nodes": {"method": "adaptix", "nodes": 16},
    "Adaptix, 60 nodes": {"method": "adaptix", "nodes": 60},
    "Adaptix, MCTS, 16 nodes": {"method": "adaptix", "options": {"search": "mcts"}, "nodes": 16},
    "Adaptix, MCTS and the paper's learning, 16 nodes": {
        "method": "adaptix", "options": {"search": "mcts", "learn": "paper"}, "nodes": 16,
    },
    "Adaptix, nothing learned, 16 nodes": {"method": "adaptix", "options": {"learn": "off"}, "nodes": 16},
    "Adaptix, an empty table, 16 nodes": {"method": "adaptix", "options": {"table": "none"}, "nodes": 16},
    "auto": {"method": "auto"},
    "auto with EESD": {"method": "auto", "options": {"drafter": "eesd"}},
    "auto with the draft model": {"method": "auto", "options": {"drafter": "draft_tree"}},
}  # fmt: skip
"""The arguments of `Generator.use` by row; without `nodes` or `control`, the method's default control is used."""

_WARM_UP, _WARM_UP_TOKENS = "One, two, three, one, two, three, one, two", 24


def rows_of(arguments: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """Return the selected rows, with additional rows for the heads and stores given as arguments."""
    heads = dict(each.split("=", 1) for each in arguments.head)
    heads |= {f"{size} tokens": str(resized_head(size, arguments.cells.parent)) for size in arguments.size}
    further: dict[str, dict[str, Any]] = {}
    for name, head in heads.items():
        options = {"head": head, **CHAIN}
        further[f"EESD, {name}, Beta-TS"] = {"method": "eesd", "options": options, "control": "beta_ts"}
        further[f"EESD, {name}, fixed 4"] = {"method": "eesd", "options": options, "nodes": 4}
    for name, store in (each.split("=", 1) for each in arguments.store):
        for nodes in (16, 64):
            further[f"REST, {name}, {nodes} nodes"] = {"method": "rest", "options": {"store": store}, "nodes": nodes}
        paper = {"store": store, "learn": "off", "shortest": 2, "doubt": 0}
        for longest in (2, 3, 4, 6, 8, 12, 16):
            row = f"REST, {name}, the paper's settings, 64 nodes, contexts of {longest} tokens"
            further[row] = {"method": "rest", "options": {**paper, "longest": longest}, "nodes": 64}
    if arguments.skipped:
        skipped = {"skipped": str(arguments.skipped)}
        further["layer skipping, searched"] = {"method": "layer_skip", "options": skipped}
    rows = ROWS | further
    if unknown := [pattern for pattern in arguments.row if not filter_names(rows, pattern)]:
        raise SystemExit(f"There is no row {unknown[0]!r}. Rows are: {'; '.join(rows)}.")
    return {row: how for row, how in rows.items() if any(fnmatchcase(row, pattern) for pattern in arguments.row)}


def resized_head(size: int, folder: Path) -> Path:
    """Write the shipped early-exit head with `size` scored tokens, the most frequent first; return its folder.

    Tokens beyond its own follow by id; a tokenizer numbers them roughly by frequency.
    """
    shipped, resized = SHIPPED / "smollm2" / "eesd", folder / f"eesd-{size}"
    card, tensors = json.loads((shipped / CONFIG_FILE).read_text()), load_file(shipped / WEIGHTS_FILE)
    ranked = tensors.pop(IDS).tolist()
    if size < card["vocabulary"]:
        others = sorted(set(range(card["vocabulary"])) - set(ranked))
        tensors[IDS] = torch.tensor([*ranked, *others][:size], dtype=torch.int32)
    save_head(resized, HeadCard(**card), tensors)
    return resized


def measure(arguments: argparse.Namespace) -> None:
    """Measure the cells that are missing in the file."""
    path, known = arguments.cells, set()
    if path.exists():
        known = {tuple(json.loads(line)["cell"]) for line in path.read_text().splitlines()}
    generator = foredraft.load(arguments.model, method="none")
    drafters, costs = {}, {}
    rows = rows_of(arguments)
    for row, how in rows.items():
        generator.use(**{"options": {}, **how})
        for temperature in (0.0, 0.7):  # the first text compiles, which must not be timed
            generator.generate(_WARM_UP, max_new_tokens=_WARM_UP_TOKENS, do_sample=temperature > 0)
        generator.forget()
        drafters[row] = generator.drafter
    with path.open("a") as file:
        for temperature in arguments.temperature:
            sampling = {"do_sample": True, "temperature": temperature} if temperature else {}
            for prompt in load_tasks(TASKS, arguments.data, arguments.prompts):
                for row, drafter in drafters.items():
                    cell = (row, temperature, prompt.task, prompt.number)
                    if cell in known:
                        continue
                    how = {name: value for name, value in rows[row].items() if name != "options"}
                    own = costs.setdefault((row, temperature), StepCosts())
                    generator.attach(how.pop("method"), drafter, **how, costs=own)
                    text = generator.generate(
                        prompt.prompt(), max_new_tokens=arguments.tokens, seed=prompt.number, **sampling
                    )
                    line = {"cell": cell, "ids": list(text.token_ids), "statistics": text.statistics.as_dict()}
                    file.write(json.dumps(line) + "\n")
                    file.flush()


def table(path: Path) -> None:
    """Print a table for each temperature, over the prompts measured for all rows; decode time only."""
    found: dict[float, dict[str, dict[tuple[str, int], Any]]] = defaultdict(lambda: defaultdict(dict))
    for line in map(json.loads, path.read_text().splitlines()):
        row, temperature, task, number = line["cell"]
        found[temperature][row][task, number] = line
    for temperature, rows in found.items():
        common = set.intersection(*(set(lines) for lines in rows.values()))
        print(f"\nT={temperature:g}, {len(common)} prompts\n")
        print("| | tokens per step | v_d | r_d | HM | speed-up | same text as plain |\n|---|---|---|---|---|---|---|")
        plain = rows["plain"]
        seconds = add_up([_statistics(plain[key]["statistics"]) for key in common]).decode_seconds_per_token
        for row, lines in rows.items():
            total = add_up([_statistics(lines[key]["statistics"]) for key in common])
            same = sum(lines[key]["ids"] == plain[key]["ids"] for key in common)
            print(
                f"| {row} | {total.tokens_per_target_step:.2f} | {total.draft_acceptance_rate:.2f} | "
                f"{total.drafted_share:.2f} | {100 * total.harmonic_mean:.1f} | "
                f"{seconds / total.decode_seconds_per_token:.2f} | {same} of {len(common)} |"
            )


def _statistics(counts: dict[str, Any]) -> Statistics:
    return Statistics(**{name: counts[name] for name in Statistics.__dataclass_fields__})


def main() -> None:
    """Measure, or print the tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--model", default="smollm2", help="smollm2, or a folder with its weights in bfloat16")
    parser.add_argument("--data", type=Path, help="folder of the tasks' files")
    parser.add_argument("--cells", type=Path, required=True, help="file of the measured cells")
    parser.add_argument("--prompts", type=int, default=10, help="per task")
    parser.add_argument("--tokens", type=int, default=128, help="maximum number of new tokens per text")
    parser.add_argument("--temperature", type=float, action="append", help="0 is greedy; repeatable")
    parser.add_argument("--head", action="append", default=[], help="NAME=FOLDER, an additional EESD head; repeatable")
    parser.add_argument("--store", action="append", default=[], help="NAME=FOLDER, a datastore for REST; repeatable")
    parser.add_argument("--size", action="append", default=[], type=int, help="scored tokens of one more EESD head")
    parser.add_argument("--skipped", type=Path, help="a file of scripts/skipped_layers.py, for one more row")
    parser.add_argument("--row", action="append", help="measure only these rows, such as 'REST*'; repeatable")
    parser.add_argument("--table", action="store_true", help="print the tables instead of measuring")
    arguments = parser.parse_args()
    arguments.temperature = arguments.temperature or [0.0]
    arguments.row = arguments.row or ["*"]
    if arguments.table:
        table(arguments.cells)
    else:
        measure(arguments)


if __name__ == "__main__":
    main()

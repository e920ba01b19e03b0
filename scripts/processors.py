"""Compile a model for several kinds of processors, and compare the texts and the bits of the scores.

`python scripts/processors.py MODEL --data PROMPTS` compiles it for every kind whose instructions this machine has. Each
package then writes the same texts with drafts, half greedily and half sampled, and scores one text in passes of several
sizes. The exit status is 1 if any text or any bit differs.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import numpy as np
from torch._inductor import config

import foredraft
from foredraft.bench.tasks import load_tasks
from foredraft.graph.layout import lay_out_text
from foredraft.model.compiled import kernels
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.machine import processor_lines

KINDS = {  # what the compiler takes for the processor, the flag that this machine must have, numbers in a vector
    "AVX2": ("x86-64-v3", "avx2", 8),
    "AVX-VNNI": ("alderlake", "avx_vnni", 8),
    "AVX-512": ("skylake-avx512", "avx512bw", 16),
    "AVX-512 VNNI": ("cascadelake", "avx512_vnni", 16),
}
NATIVE = "this processor"
ROWS = (1, 2, 3, 5, 8, 13, 40, 100)  # of the passes that are compared
CONTEXT = 300  # tokens before them


def outcome(model: str, kind: str, data: Path, per_task: int, tokens: int) -> dict[str, object]:
    """Compile the model for a kind of processor; return a hash of scores, and the texts' ids."""
    if kind != NATIVE:
        march, _, lanes = KINDS[kind]
        kernels.vector_lanes, kernels.multiplies_by_pairs = (lambda: lanes), (lambda: False)
        config.cpp.march = march
    generator = foredraft.load(model)
    generator.compile()
    target, scores, rng = generator.target, hashlib.sha256(), np.random.default_rng(0)
    cache = target.new_cache()
    target.prefill(rng.integers(0, target.vocabulary, CONTEXT), cache)
    for rows in ROWS:
        layout = lay_out_text(rng.integers(0, target.vocabulary, rows), cache.length)
        scores.update(target.forward(layout, cache).logits.contiguous().numpy().tobytes())
        cache.commit(range(rows))
    texts = []
    for number, each in enumerate(load_tasks((), data, per_task)):
        drawn = {"do_sample": True, "temperature": 0.7, "seed": number} if number % 2 else {}
        texts.append(list(generator.generate(each.prompt(), max_new_tokens=tokens, **drawn).token_ids))
    return {"scores": scores.hexdigest(), "texts": texts}


def main() -> None:
    """Make the packages, one process each, and print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", nargs="?", default=SMOLLM2)
    parser.add_argument("--data", type=Path, required=True, help="folder with the tasks' files")
    parser.add_argument("--prompts", type=int, default=34, help="per task")
    parser.add_argument("--tokens", type=int, default=128, help="maximum number of new tokens")
    parser.add_argument("--kind", help=argparse.SUPPRESS)  # of the processes that are started
    given = parser.parse_args()
    if given.kind is not None:
        print(json.dumps(outcome(given.model, given.kind, given.data, given.prompts, given.tokens)))
        return
    flags = " ".join(processor_lines("flags")).split()
    found = {}
    for kind in (NATIVE, *(name for name, (_, flag, _) in KINDS.items() if flag in flags)):
        with tempfile.TemporaryDirectory() as cache:
            child = {**os.environ, "FOREDRAFT_CACHE": cache, "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"}
            command = [sys.executable, *sys.argv, "--kind", kind]
            done = subprocess.run(command, env=child, stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603  # the command is this script's own
        found[kind] = json.loads(done.stdout.splitlines()[-1])
    first = found[NATIVE]
    print("| compiled for | scores | texts that differ |\n|---|---|---|")
    for kind, own in found.items():
        differ = sum(a != b for a, b in zip(own["texts"], first["texts"], strict=True))
        same = "the same bits" if own["scores"] == first["scores"] else "OTHER BITS"
        print(f"| {kind} | {same} | {differ} of {len(first['texts'])} |")
    sys.exit(any((own["scores"], own["texts"]) != (first["scores"], first["texts"]) for own in found.values()))


if __name__ == "__main__":
    main()

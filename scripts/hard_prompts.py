"""Write prompts that no drafter can predict: random tokens, and a language that the stores do not contain.

python scripts/hard_prompts.py --data PROMPTS --out hard
foredraft index build CORPUS/stories.jsonl.gz --model smollm2 --out stories.store
foredraft bench run --task hard/random_tokens.jsonl:text --task hard/unseen_language.jsonl:text \
    --method none --method auto --method 'auto:{"store": "stories.store"}' --temperature 0.7
"""

import argparse
import json
from collections.abc import Iterable
from pathlib import Path

import numpy as np

from foredraft.bench.tasks import load_task
from foredraft.model.gguf.files import SMOLLM2
from foredraft.model.loading import load_tokenizer

_TRANSLATION = "spec_bench/translation"
"""Its prompts are an English instruction, a colon, and a sentence in German."""


def random_tokens(count: int, length: int, seed: int) -> list[str]:
    """Return texts of random ids of the default model's vocabulary, without special tokens."""
    tokenizer = load_tokenizer(SMOLLM2)
    ids = np.array(sorted(set(range(len(tokenizer))) - set(tokenizer.all_special_ids)))
    drawn = np.random.default_rng(seed)
    return [tokenizer.decode(drawn.choice(ids, length).tolist()) for _ in range(count)]


def unseen_language(data: Path, count: int) -> list[str]:
    """Return the German sentences of Spec-Bench's translation task, without the instruction."""
    return [prompt.turns[0].partition(":")[2].strip() for prompt in load_task(_TRANSLATION, data, count)]


def write(path: Path, texts: Iterable[str]) -> None:
    """Write JSON lines with the field `text`."""
    path.write_text("".join(json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts), encoding="utf-8")
    print(path)


def main() -> None:
    """Write the files."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", type=Path, required=True, help="folder with spec_bench.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the files to write")
    parser.add_argument("--prompts", type=int, default=30, help="per file")
    parser.add_argument("--length", type=int, default=64, help="tokens per random prompt")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    write(given.out / "random_tokens.jsonl", random_tokens(given.prompts, given.length, given.seed))
    write(given.out / "unseen_language.jsonl", unseen_language(given.data, given.prompts))


if __name__ == "__main__":
    main()

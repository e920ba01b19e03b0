"""Compare the tokens that foredraft and llama.cpp find in texts, and those that end a turn, by the same GGUF files.

    python scripts/gguf_tokens.py [FILE_OR_FOLDER ..] [--llama PYTHON] [--work FOLDER] [--lines JSON] [--splits]
    python scripts/gguf_tokens.py --record [--llama PYTHON] [--work FOLDER]

Without files, it is the default model's. Texts are the tests' (LINES), or those of a list in a JSON file, and those of
`FILE.inp` where llama.cpp's `FILE.out` says their tokens. llama.cpp is llama-cpp-python, in an environment of its own
that is made in the work folder, or the one of PYTHON. `--splits` puts each known pre-tokenizer on the vocabulary of
each file, which must be byte-level. `--record` writes llama.cpp's tokens of LINES for the tests, in the default
model's file and in small vocabularies, which are learned from LINES across all borders of words, so that a wrong split
is seen.
"""

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDED = Path(__file__).parent.parent / "tests" / "data" / "gguf_tokens.json"
KEYS = ("model", "pre", "tokens", "token_type", "scores", "merges")
SEPARATOR = "\n__ggml_vocab_test__\n"  # of the texts in llama.cpp's FILE.inp
PLAIN = ("gemma4", "sarvam-moe")  # pre-tokenizers of plain text, not of bytes
CONTROL = {
    "<s>": 3, "</s>": 3, "<unk>": 2, "<|im_start|>": 3, "<|im_end|>": 1, "<tag>": 4, "<|call|>": 3, "<|return|>": 3,
    "<|end|>": 3, "<|eom_id|>": 3, "<|file_sep|>": 4, "[PAD]": 3,
}  # fmt: skip
"""First tokens of small vocabularies -> their kinds (`tokenizer.ggml.token_type`)."""
LINES = tuple(json.loads(RECORDED.read_text(encoding="utf-8"))["lines"])
"""Texts with borders of words, digits, signs, scripts and control tokens of all kinds."""


def llama_worker(texts: str, *files: str) -> None:
    """Print for each file the ids of each text, those of "x" with its surroundings, and the ids that end a turn."""
    import llama_cpp  # in an environment of its own

    for file in files:
        llama = llama_cpp.Llama(file, vocab_only=True, verbose=False)
        vocabulary = llama_cpp.llama_model_get_vocab(llama.model)
        ids = [llama.tokenize(text.encode(), add_bos=False, special=True) for text in json.loads(texts)]
        surrounded = llama.tokenize(b"x", add_bos=True, special=True)
        count = llama_cpp.llama_vocab_n_tokens(vocabulary)
        ends = [token for token in range(count) if llama_cpp.llama_vocab_is_eog(vocabulary, token)]
        print(f"\nfound {json.dumps([ids, surrounded, ends])}", flush=True)


def found_there(python: str, texts: Sequence[str], file: Path) -> Any:
    """Return what llama.cpp finds in a file; see `llama_worker`. RuntimeError if it cannot read the file."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    command = [python, __file__, "--worker", json.dumps(texts), str(file)]
    ran = subprocess.run(command, env=environment, capture_output=True, check=False)  # noqa: S603  # this script
    for line in ran.stdout.decode().splitlines():
        if line.startswith("found "):
            return json.loads(line.removeprefix("found "))
    raise RuntimeError(f"llama.cpp cannot read {file}: {ran.stderr.decode(errors='replace')[-200:]}")


def found_here(metadata: Any, texts: Sequence[str]) -> Any:
    """Return the same of foredraft."""
    from transformers import AutoTokenizer

    from foredraft.model.gguf.tokenizers import write_tokenizer

    with tempfile.TemporaryDirectory() as folder:
        ends = write_tokenizer(metadata, Path(folder)).ends
        tokenizer = AutoTokenizer.from_pretrained(folder)
    ids = [tokenizer(text, add_special_tokens=False).input_ids for text in texts]
    return [ids, tokenizer("x").input_ids, list(ends)]


def digest(ids: Sequence[Sequence[int]]) -> str:
    """Return a short name of the ids of texts."""
    return hashlib.sha256(json.dumps(ids).encode()).hexdigest()[:12]


def write_file(keys: Mapping[str, Any], file: Path) -> Path:
    """Write a GGUF file with a tokenizer, of which `keys` are those of its metadata, and without weights."""
    from gguf import GGUFWriter

    writer = GGUFWriter(str(file), "llama")
    writer.add_context_length(64), writer.add_embedding_length(32), writer.add_block_count(1), writer.add_head_count(1)
    writer.add_layer_norm_rms_eps(1e-5), writer.add_feed_forward_length(32)
    for key, value in keys.items():
        if isinstance(value, bool):
            writer.add_bool(key, value)
        elif isinstance(value, int):
            writer.add_uint32(key, value)
        elif isinstance(value, str):
            writer.add_string(key, value)
        else:
            writer.add_array(key, value)
    writer.write_header_to_file(), writer.write_kv_data_to_file(), writer.write_tensors_to_file(), writer.close()
    return file


def learned(alphabet: Sequence[str], steps: Mapping[str, Any]) -> tuple[list[str], list[str]]:
    """Return tokens, those of CONTROL first, and merges that are learned from LINES, each of which is one word."""
    from tokenizers import Tokenizer, models, trainers

    tokenizer = Tokenizer(models.BPE())
    for name, step in steps.items():
        setattr(tokenizer, name, step)
    tokenizer.train_from_iterator(
        LINES, trainers.BpeTrainer(
            vocab_size=700, min_frequency=1, max_token_length=6, initial_alphabet=list(alphabet),
            special_tokens=list(CONTROL), show_progress=False,
        )
    )  # fmt: skip
    model = json.loads(tokenizer.to_str())["model"]
    return list(model["vocab"]), [" ".join(merge) for merge in model["merges"]]


def small_vocabularies() -> dict[str, dict[str, Any]]:
    """Return the keys of small tokenizers, one of each kind."""
    from tokenizers import normalizers, pre_tokenizers

    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    byte_tokens, byte_merges = learned(pre_tokenizers.ByteLevel.alphabet(), {"pre_tokenizer": words})
    found, merges = learned((), {"normalizer": normalizers.Replace(" ", "\u2581")})
    tokens = [*CONTROL, *(f"<0x{byte:02X}>" for byte in range(256)), *found[len(CONTROL) :]]
    scored = {"model": "llama", "tokens": tokens, "scores": [float(-number) for number in range(len(tokens))]}
    vocabularies = {
        "byte-level": {"model": "gpt2", "tokens": byte_tokens, "merges": byte_merges},
        "space before": scored,
        "no space before": {**scored, "add_space_prefix": False, "add_bos_token": False, "add_eos_token": True},
        "plain merges": {"model": "gemma4", "tokens": tokens, "merges": merges},
    }
    for keys in vocabularies.values():
        count = len(keys["tokens"]) - len(CONTROL)
        bytes_ = 256 if "<0x00>" in keys["tokens"] else 0
        keys["token_type"] = [*CONTROL.values(), *[6] * bytes_, *[1] * (count - bytes_)]
        keys |= {"bos_token_id": 0, "eos_token_id": 1, "unknown_token_id": 2}
    return {
        name: {f"tokenizer.ggml.{key}": value for key, value in keys.items()} for name, keys in vocabularies.items()
    }


def record(python: str, work: Path) -> None:
    """Write what llama.cpp finds in LINES for the tests."""
    from foredraft.model.gguf.files import smollm2_file
    from foredraft.model.gguf.splits import NAMES

    small, file = small_vocabularies(), work / "small.gguf"
    splits = {}
    for name in NAMES:
        keys = small["plain merges" if name in PLAIN else "byte-level"] | {"tokenizer.ggml.model": "gpt2"}
        splits[name] = digest(found_there(python, LINES, write_file(keys | {"tokenizer.ggml.pre": name}, file))[0])
    data = {
        "made by": "scripts/gguf_tokens.py --record, from llama.cpp's tokens (llama-cpp-python 0.3.36)",
        "lines": LINES,
        "smollm2": found_there(python, LINES, smollm2_file()),
        "small": {
            name: {"keys": keys, "found": found_there(python, LINES, write_file(keys, file))}
            for name, keys in small.items()
        },
        "splits": splits,
    }
    RECORDED.parent.mkdir(exist_ok=True)
    RECORDED.write_text(json.dumps(data, ensure_ascii=False, separators=(",", ":")) + "\n", encoding="utf-8")


def compare(python: str, file: Path, texts: Sequence[str], metadata: Any = None, expected: Any = None) -> bool:
    """Print how foredraft's and llama.cpp's tokens of a file differ, and return whether they do."""
    from foredraft.errors import UnsupportedModelError
    from foredraft.model.gguf.metadata import read_header

    try:
        ours = found_here(metadata or read_header(file)[0], texts)
    except UnsupportedModelError as error:
        print(f"{file.stem:32} REFUSED  {error}", flush=True)
        return False
    theirs = found_there(python, texts, file) if expected is None else [expected, *ours[1:]]
    wrong = [text for text, here, there in zip(texts, ours[0], theirs[0], strict=True) if here != there]
    around, ends = ("same" if ours[at] == theirs[at] else f"{ours[at]} / {theirs[at]}" for at in (1, 2))
    shortest = f"  such as {min(wrong, key=len)!r}" if wrong else ""
    print(
        f"{file.stem:32} {len(wrong):4} of {len(texts)} texts differ, around: {around}, ends: {ends}{shortest}",
        flush=True,
    )
    return bool(wrong) or ours[1:] != theirs[1:]


def compare_splits(python: str, file: Path, texts: Sequence[str], work: Path) -> int:
    """Compare each pre-tokenizer on the vocabulary of a file, and return how many differ."""
    from foredraft.model.gguf.metadata import read_header
    from foredraft.model.gguf.splits import NAMES

    metadata, wrong = read_header(file)[0], 0
    keys = {key: metadata.get(key) for key in (f"tokenizer.ggml.{name}" for name in KEYS) if key in metadata}
    for name in NAMES:
        wrong += compare(python, write_file(keys | {"tokenizer.ggml.pre": name}, work / f"{name}.gguf"), texts)
        (work / f"{name}.gguf").unlink()
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Run the comparison, and return how many files differ."""
    from foredraft.model.gguf.files import smollm2_file

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", type=Path, metavar="FILE_OR_FOLDER")
    parser.add_argument("--llama", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "foredraft-referee")
    parser.add_argument("--lines", type=Path, help="JSON file with a list of texts")
    parser.add_argument("--splits", action="store_true", help="put each pre-tokenizer on the vocabulary of each file")
    parser.add_argument("--record", action="store_true", help="write llama.cpp's tokens for the tests")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    if (python := options.llama) is None:
        from peers.environments import python_of

        python = str(python_of("llama_cpp", options.work))
    if options.record:
        record(python, options.work)
    texts = json.loads(options.lines.read_text(encoding="utf-8")) if options.lines else LINES
    given = options.files or [smollm2_file()]
    wrong = 0
    for file in (file for each in given for file in (sorted(each.glob("*.gguf")) if each.is_dir() else [each])):
        if options.splits:
            wrong += compare_splits(python, file, texts, options.work)
            continue
        wrong += compare(python, file, texts)
        told, asked = (file.with_name(file.name + suffix) for suffix in (".out", ".inp"))
        if told.exists() and asked.exists():
            lines = asked.read_text(encoding="utf-8").split(SEPARATOR)
            known = [[int(token) for token in line.split()] for line in told.read_text().split("\n")[: len(lines)]]
            wrong += compare(python, file, lines, expected=known)
    return wrong


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        llama_worker(*sys.argv[2:])
    else:
        raise SystemExit(1 if main(sys.argv[1:]) else 0)

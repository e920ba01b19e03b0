"""Compare what foredraft computes from GGUF files with llama.cpp: scores of tiny files of every kind and type.

    python scripts/gguf_referee.py [--llama PYTHON] [--work FOLDER] [--only WORD,..] [--types] [--record]

Files are those of gguf_files.py. Each is scored on 300 random ids by llama.cpp (llama-cpp-python, in an environment of
its own that is made in the work folder, or the one of PYTHON) and by foredraft, which scores half of them in one pass
and half in another; a family that foredraft refuses is scored by transformers with foredraft's configuration and
weights. The figure is the largest difference of two scores over the standard deviation of all. A reverse check writes
foredraft's file with another epsilon or rotary base: it must differ, or what the file says was not read. `--types`
compares files of each quantisation type with llama.cpp on the dequantised weights. `--record` writes llama.cpp's scores
for the tests.
"""

import argparse
import ctypes
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import numpy as np

import gguf_files

TOKENS = 300
RECORDED = Path(__file__).parent.parent / "tests" / "data" / "gguf_scores.npz"
POSITIONS = (0, 1, 7, 31, 63, 64, 65, 127, 149, 150, 211, 299)
"""Positions whose scores are recorded: the ends of windows and passes, and some between."""
COLUMNS = slice(3, 285, 6)
"""Ids whose scores are recorded."""
TYPES = {
    "F16": 1, "BF16": 32, "Q4_0": 2, "Q4_1": 3, "Q5_0": 8, "Q5_1": 9, "Q8_0": 7, "Q2_K": 10, "Q3_K": 12, "Q4_K": 15,
    "Q5_K": 17, "Q6_K": 18, "IQ4_NL": 25, "IQ4_XS": 30, "IQ3_S": 26, "TQ2_0": 37, "MXFP4": 38,
}  # fmt: skip
"""Types of a file's matrices -> llama.cpp's numbers of file types."""


def token_ids() -> np.ndarray:
    """Return the ids that are scored, int64[300]: no control tokens."""
    return np.random.default_rng(gguf_files.SEED).integers(3, gguf_files.VOCABULARY - 3, TOKENS)


def scores_here(file: Path) -> tuple[np.ndarray, str]:
    """Return the scores of all ids at all positions, float32[300, V], and who computed them; see the module."""
    import torch

    import foredraft
    from foredraft.errors import UnsupportedModelError
    from foredraft.graph.layout import lay_out_text
    from foredraft.model.loading import load_model

    ids, half = token_ids(), TOKENS // 2
    try:
        target = foredraft.load(str(file), method="none", dtype="float32", device="cpu", compile=False).target
    except UnsupportedModelError as refused:
        model = load_model(str(file), "float32", "cpu")  # raises the same error if the file was refused
        with torch.inference_mode():
            return model(torch.from_numpy(ids)[None]).logits[0].numpy(), f"transformers; foredraft: {refused}"
    cache = target.new_cache()
    first = target.forward(lay_out_text(ids[:half], 0), cache).logits.numpy().copy()
    cache.commit(range(half))
    return np.concatenate([first, target.forward(lay_out_text(ids[half:], half), cache).logits.numpy()]), "foredraft"


def apart(ours: np.ndarray, theirs: np.ndarray) -> float:
    """Return the largest difference of two scores over the standard deviation of `theirs`; infinite for no numbers."""
    found = float(np.abs(ours - theirs).max() / theirs.std())
    return found if np.isfinite(found) else float("inf")


class Referee:
    """llama.cpp, in the interpreter `python`, whose files and results are in a folder."""

    def __init__(self, python: str, work: Path) -> None:
        self.python, self.work = python, work

    def scores(self, file: Path) -> np.ndarray | str:
        """Return llama.cpp's scores of a file, float32[300, V], or the sentence why it has none."""
        out = self.work / "scores.npy"
        said = self._run("score", str(file), str(out))
        return said or np.load(out)

    def quantised(self, file: Path, out: Path, kind: int) -> str:
        """Write a file with the matrices of another in a type; return the sentence why that failed, or nothing."""
        out.unlink(missing_ok=True)
        return self._run("quantise", str(file), str(out), str(kind))

    def _run(self, *arguments: str) -> str:
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        ran = subprocess.run(  # noqa: S603  # this script, in llama.cpp's environment
            [self.python, __file__, "--worker", *arguments], env=environment, capture_output=True, check=False
        )
        lines = ran.stderr.decode(errors="replace").splitlines()
        said = [line for line in lines if "error" in line.lower() or "failed" in line.lower()]
        return " / ".join(said[:2] or lines[-1:] or [f"status {ran.returncode}"]) if ran.returncode else ""


def llama_worker(what: str, file: str, out: str, kind: str = "0") -> None:
    """Score or quantise a file, inside llama.cpp's environment."""
    import llama_cpp  # in the other environment

    if what == "score":
        llama = llama_cpp.Llama(
            file, n_ctx=512, n_batch=512, n_ubatch=512, n_threads=1, n_threads_batch=1, logits_all=True, type_k=0,
            type_v=0, flash_attn=False, swa_full=True, verbose=True,
        )  # fmt: skip
        llama.eval(token_ids().tolist())
        np.save(out, llama.scores[:TOKENS].astype(np.float32))
        return
    settings = llama_cpp.llama_model_quantize_default_params()
    settings.nthread, settings.ftype, settings.pure = 1, int(kind), True
    if code := llama_cpp.llama_model_quantize(file.encode(), out.encode(), ctypes.byref(settings)):
        raise RuntimeError(f"llama_model_quantize failed with {code}")


def compare_kinds(referee: Referee, words: Sequence[str], *, record: bool) -> int:
    """Print a row for each file, and return how many differ; see the module."""
    recorded, wrong = {}, 0
    for case in gguf_files.CASES:
        if words and not any(word in case.name for word in words):
            continue
        theirs = referee.scores(gguf_files.write(case, referee.work / "tiny.gguf"))
        if isinstance(theirs, str):
            print(f"{case.name:30} llama.cpp cannot: {theirs}", flush=True)
            wrong += 1
            continue
        recorded[case.name] = theirs[list(POSITIONS), COLUMNS]
        verdict, row = _verdict(case, referee.work, theirs)
        wrong += verdict == "DIFFERS"
        print(f"{case.name:30} {verdict:8} {row}", flush=True)
    if record:
        RECORDED.parent.mkdir(exist_ok=True)
        kept = dict(np.load(RECORDED)) if RECORDED.exists() else {}
        names = {case.name for case in gguf_files.CASES}
        np.savez_compressed(RECORDED, **{name: each for name, each in (kept | recorded).items() if name in names})
    return wrong


def _verdict(case: gguf_files.Case, work: Path, theirs: np.ndarray) -> tuple[str, str]:
    from foredraft.errors import ForedraftError

    try:
        ours, who = scores_here(gguf_files.write(case, work / "tiny.gguf"))
    except ForedraftError as error:
        return "REFUSED", str(error)
    error = apart(ours, theirs)
    epsilon = ".attention.layer_norm_epsilon" if case.centred else ".attention.layer_norm_rms_epsilon"
    base = 3 * (case.keys.get(".rope.freq_base", 1e4) or 0)
    checks = {"epsilon": {epsilon: 0.3}, "base": {".rope.freq_base": base} if base else {}}
    found = []
    for name, changed in checks.items():
        if not changed:
            continue
        try:
            other = scores_here(gguf_files.write(case, work / "other.gguf", changed=changed))[0]
            found.append(f"{name} {'IGNORED' if np.array_equal(other, ours) else f'{apart(other, theirs):.1e}'}")
        except ForedraftError:
            found.append(f"{name} refused")
    return ("SAME" if error <= case.limit else "DIFFERS"), f"{error:8.1e}  {'  '.join(found)}  {who[:60]}"


def compare_types(referee: Referee) -> int:
    """Print for each type how foredraft's scores differ from llama.cpp's on the dequantised weights; count others."""
    import gguf

    from foredraft.model.gguf.reader import opened

    like = next(case for case in gguf_files.CASES if case.name == "llama")
    case = gguf_files.Case("types", like.architecture, like.layer, sizes={"D": 256, "hd": 64, "F": 512})
    base, wrong = gguf_files.write(case, referee.work / "types.gguf"), 0
    for name, number in TYPES.items():
        file = referee.work / f"types.{name}.gguf"
        if said := referee.quantised(base, file, number):
            print(f"{name:8} llama.cpp cannot: {said}", flush=True)
            continue
        _, tensors = opened([file])
        plain = {
            each: gguf.quants.dequantize(*tensors.stored(each)).reshape(tensors.shapes[each]).astype(np.float32)
            for each in tensors
        }
        theirs = referee.scores(gguf_files.write(case, referee.work / "plain.gguf", tensors=plain))
        if isinstance(theirs, str):
            raise TypeError(theirs)
        error = apart(scores_here(file)[0], theirs)
        wrong += error > case.limit
        print(f"{name:8} {'SAME' if error <= case.limit else 'DIFFERS':8} {error:8.1e}", flush=True)
    return wrong


def main(arguments: Sequence[str]) -> int:
    """Run the comparison, and return how many files differ."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "foredraft-referee")
    parser.add_argument("--only", default="", help="words of the names of files, separated by commas")
    parser.add_argument("--types", action="store_true", help="compare the quantisation types")
    parser.add_argument("--record", action="store_true", help="write llama.cpp's scores for the tests")
    options = parser.parse_args(arguments)
    options.work.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.work / "cache", ignore_errors=True)  # folders that another version of the code made
    os.environ["FOREDRAFT_CACHE"] = str(options.work / "cache")
    if (python := options.llama) is None:
        from peers.environments import python_of

        python = str(python_of("llama_cpp", options.work))
    referee = Referee(python, options.work)
    if options.types:
        return compare_types(referee)
    return compare_kinds(referee, [word for word in options.only.split(",") if word], record=options.record)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--worker"]:
        llama_worker(*sys.argv[2:])
    else:
        raise SystemExit(1 if main(sys.argv[1:]) else 0)

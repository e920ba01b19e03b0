"""Time models with recurrent layers, experts or latents, in published shapes with random weights, beside llama.cpp.

`python scripts/real_shapes.py [NAME ...]` writes a file of each shape, compiles it, and prints the passes of 1 to 256
rows after 200 tokens, and the time of a token beside llama.cpp's on the same file, by turns. llama.cpp is installed at
the first run, unless `--llama` is an interpreter that has it.
"""

import argparse
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np

import gguf_files
from gguf_referee import Referee

CONTEXT, TOKENS, ROUNDS = 200, 24, 5  # tokens before the timed ones; timed ones of a round
THREADS = 2
_Q4_0 = 2  # llama.cpp's number of the type
_ATTENDING = (2, 5, 8, 10, 12, 14)  # LFM2's layers
_WIDE = 16 * 128  # of Qwen3.5's recurrent heads
_LFM2 = " shortconv.conv shortconv.in_proj shortconv.out_proj"
_ATTENTION = " attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm"
_MAMBA2 = " ssm_in ssm_conv1d+ ssm_dt~ ssm_a! ssm_d! ssm_out"
SHAPES = {
    "LFM2-350M": (65_536, gguf_files.Case(
        "LFM2-350M", "lfm2",
        lambda number: "attn_norm ffn_norm ffn_gate ffn_up ffn_down" + (_ATTENTION if number in _ATTENDING else _LFM2),
        {".attention.head_count_kv": [8 if number in _ATTENDING else 0 for number in range(16)],
         ".shortconv.l_cache": 3, ".rope.freq_base": 1e6},
        "token_embd_norm", {"D": 1024, "H": 16, "K": 8, "hd": 64, "F": 4608, "L": 16, "ctx": 4096})),
    "Qwen3.5-0.8B": (248_320, gguf_files.Case(
        "Qwen3.5-0.8B", "qwen35",
        lambda number: "attn_norm post_attention_norm ffn_gate ffn_up ffn_down" + (_ATTENTION if number % 4 == 3 else
            " attn_qkv attn_gate ssm_conv1d ssm_dt~ ssm_a! ssm_norm ssm_out ssm_beta ssm_alpha"),
        {".attention.key_length": 256, ".attention.value_length": 256, ".ssm.conv_kernel": 4, ".ssm.inner_size": _WIDE,
         ".ssm.state_size": 128, ".ssm.time_step_rank": 16, ".ssm.group_count": 16, ".full_attention_interval": 4,
         ".rope.dimension_count": 64, ".rope.dimension_sections": [11, 11, 10, 0], ".rope.freq_base": 1e7},
        "output_norm", {"D": 1024, "H": 8, "K": 2, "hd": 256, "F": 3584, "L": 24, "ctx": 4096},
        {"ssm_dt": (16,), "ssm_a": (16,), "ssm_norm": (128,), "ssm_out": (1024, _WIDE), "ssm_conv1d": (3 * _WIDE, 4),
         "attn_q": (2 * _WIDE, 1024), "attn_qkv": (3 * _WIDE, 1024), "attn_gate": (_WIDE, 1024),
         "ssm_beta": (16, 1024), "ssm_alpha": (16, 1024), "attn_output": (1024, _WIDE)})),
    "Granite-3.1-1B-A400M": (49_155, gguf_files.Case(
        "Granite-3.1-1B-A400M", "granitemoe",
        "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps",
        {".expert_count": 32, ".expert_used_count": 8, ".logit_scale": 6.0, ".residual_scale": 0.22,
         ".embedding_scale": 12.0, ".attention.scale": 1 / 64, ".rope.freq_base": 1.5e6},
        "output_norm", {"D": 1024, "H": 16, "K": 8, "hd": 64, "F": 512, "L": 24, "E": 32, "X": 512, "ctx": 4096})),
    "GLM-4.7-Flash": (32_000, gguf_files.Case(
        "GLM-4.7-Flash", "deepseek2",
        lambda number: "attn_norm attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b "
            "attn_output ffn_norm" + (" ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps exp_probs_b~ "
            "ffn_gate_shexp ffn_up_shexp ffn_down_shexp" if number else " ffn_gate ffn_up ffn_down"),
        {".expert_count": 64, ".expert_used_count": 4, ".expert_feed_forward_length": 1536, ".expert_shared_count": 1,
         ".expert_gating_func": 2, ".expert_weights_scale": 1.8, ".expert_weights_norm": True,
         ".leading_dense_block_count": 1, ".attention.q_lora_rank": 768, ".attention.kv_lora_rank": 512,
         ".attention.key_length": 576, ".attention.value_length": 512, ".attention.key_length_mla": 256,
         ".attention.value_length_mla": 256, ".attention.head_count_kv": 1, ".rope.dimension_count": 64,
         ".rope.freq_base": 1e6},
        "output_norm output", {"D": 2048, "H": 20, "F": 10_240, "L": 3, "E": 64, "X": 1536, "S": 1536, "ctx": 4096},
        {"attn_q_a": (768, 2048), "attn_q_a_norm": (768,), "attn_q_b": (20 * 256, 768), "attn_kv_a_mqa": (576, 2048),
         "attn_kv_a_norm": (512,), "attn_k_b": (20, 512, 192), "attn_v_b": (20, 256, 512),
         "attn_output": (2048, 20 * 256)})),
    "Gemma-4-E2B": (32_000, gguf_files.Case(
        "Gemma-4-E2B", "gemma4",
        lambda number: "attn_norm attn_q attn_q_norm attn_output post_attention_norm ffn_norm ffn_gate ffn_up ffn_down "
            "post_ffw_norm layer_output_scale inp_gate proj post_norm" + (" attn_k attn_v attn_k_norm" if number < 5
            else ""),
        {".attention.key_length": 512, ".attention.value_length": 512, ".attention.key_length_swa": 256,
         ".attention.value_length_swa": 256, ".rope.freq_base": 1e6, ".rope.freq_base_swa": 1e4,
         ".rope.dimension_count": 512, ".rope.dimension_count_swa": 256, ".final_logit_softcapping": 30.0,
         ".attention.sliding_window": 512, ".attention.sliding_window_pattern": ([True] * 4 + [False]) * 2,
         ".embedding_length_per_layer_input": 256, ".attention.head_count_kv": 1, ".attention.shared_kv_layers": 5,
         ".feed_forward_length": [6144] * 5 + [12_288] * 5},
        "output_norm rope_freqs per_layer_token_embd per_layer_model_proj per_layer_proj_norm",
        {"D": 1536, "H": 8, "L": 10, "ctx": 4096},
        {f"{name}.{number}": shape for number in range(10) for wide in (512 if number % 5 == 4 else 256,)
         for inner in (6144 if number < 5 else 12_288,) for name, shape in {
             "attn_q": (8 * wide, 1536), "attn_k": (wide, 1536), "attn_v": (wide, 1536), "attn_q_norm": (wide,),
             "attn_k_norm": (wide,), "attn_output": (1536, 8 * wide), "ffn_gate": (inner, 1536),
             "ffn_up": (inner, 1536), "ffn_down": (1536, inner)}.items()} | {
         "layer_output_scale": (1,), "rope_freqs": (256,), "inp_gate": (256, 1536), "proj": (1536, 256),
         "per_layer_token_embd": (32_000, 2560), "per_layer_model_proj": (2560, 1536), "per_layer_proj_norm": (256,)},
        {"rope_freqs": [1.0] * 64 + [1e30] * 192})),
    "Falcon-H1-0.5B": (32_784, gguf_files.Case(
        "Falcon-H1-0.5B", "falcon-h1",
        "attn_norm attn_q attn_k attn_v attn_output ffn_norm! ffn_gate ffn_up ffn_down" + _MAMBA2,
        {".attention.key_length": 64, ".attention.value_length": 64, ".ssm.conv_kernel": 4, ".ssm.inner_size": 1536,
         ".ssm.state_size": 128, ".ssm.time_step_rank": 24, ".ssm.group_count": 1, ".rope.freq_base": 1e11},
        "output_norm output", {"D": 1024, "H": 8, "K": 2, "hd": 64, "F": 2048, "L": 36, "ctx": 4096},
        {"ssm_in": (3352, 1024), "ssm_conv1d": (1792, 4), "ssm_dt": (24,), "ssm_a": (24, 1), "ssm_d": (24, 1),
         "ssm_out": (1024, 1536)})),
    "Nemotron-3-Nano": (32_000, gguf_files.Case(
        "Nemotron-3-Nano", "nemotron_h_moe",
        lambda number: "attn_norm" + (" ffn_gate_inp exp_probs_b~ ffn_up_exps ffn_down_exps ffn_up_shexp ffn_down_shexp"
            if number == 1 else " attn_q attn_k attn_v attn_output" if number == 2 else _MAMBA2 + " ssm_norm"),
        {".attention.key_length": 128, ".attention.value_length": 128, ".attention.head_count_kv": [0, 0, 2, 0],
         ".feed_forward_length": [0, 1856, 0, 0], ".attention.layer_norm_epsilon": 1e-5, ".expert_count": 128,
         ".expert_used_count": 6, ".expert_feed_forward_length": 1856, ".expert_shared_feed_forward_length": 3712,
         ".expert_shared_count": 1, ".expert_weights_norm": True, ".expert_weights_scale": 2.5,
         ".expert_group_count": 1, ".ssm.conv_kernel": 4, ".ssm.inner_size": 4096, ".ssm.state_size": 128,
         ".ssm.time_step_rank": 64, ".ssm.group_count": 8},
        "output_norm output", {"D": 2688, "H": 32, "hd": 128, "K": 2, "L": 4, "E": 128, "X": 1856, "S": 3712,
                               "ctx": 4096},
        {"ssm_in": (10_304, 2688), "ssm_conv1d": (6144, 4), "ssm_dt": (64,), "ssm_a": (64, 1), "ssm_d": (64, 1),
         "ssm_norm": (8, 512), "ssm_out": (2688, 4096)})),
}  # fmt: skip
"""Vocabulary and case by name, in the sizes of the published configurations. Three have fewer layers and a smaller
vocabulary: GLM-4.7-Flash the first three of 47, Gemma 4 E2B ten of 35, half of which share keys, and Nemotron 3 Nano
four of 52, two of which are Mamba-2's and one has experts."""


def written(name: str, referee: Referee) -> Path:
    """Write a shape's file in Q4_0, unless it is there, and return it."""
    vocabulary, case = SHAPES[name]
    file = referee.work / f"{name}.gguf"
    if not file.exists():
        gguf_files.VOCABULARY = vocabulary
        whole = gguf_files.write(case, referee.work / f"{name}.F32.gguf")
        if said := referee.quantised(whole, file, _Q4_0):
            raise RuntimeError(said)
        whole.unlink()
    return file


def timed_here(file: Path) -> Callable[[], float]:
    """Compile a file's model, print its passes, and return what times a token."""
    import foredraft
    from foredraft.graph.layout import lay_out_text
    from foredraft.model.cost import measure_cost

    generator = foredraft.load(str(file), method="none")
    ((folder, record),) = generator.compile()
    curve, _ = measure_cost(generator.target)
    passes = (f"{rows}: {1e3 * each:.1f}" for rows, each in zip(curve.rows, curve.seconds, strict=True))
    print(f"passes of rows: {', '.join(passes)} ms", flush=True)
    print(*record.told(), f"{sum(each.stat().st_size for each in folder.iterdir()) / 2**20:,.0f} MiB.", flush=True)
    target = generator.target
    states = sum(4 * int(np.prod(shape.matrices)) for shape in record.shapes if shape.matrices)
    print(f"matrices of a text: {states / 2**20:.1f} MiB", flush=True)

    def token() -> float:
        cache = target.new_cache()
        target.prefill(np.arange(3, 3 + CONTEXT), cache)
        took = []
        for at in range(CONTEXT, CONTEXT + TOKENS):
            begun = time.perf_counter()
            target.forward(lay_out_text(np.array([at]), at), cache)
            cache.commit([0])
            took.append(time.perf_counter() - begun)
        return median(took)

    return token


def timed_there(file: str) -> None:
    """Answer each line with the seconds of a token, inside llama.cpp's environment."""
    import llama_cpp

    llama = llama_cpp.Llama(file, n_ctx=512, n_threads=THREADS, n_threads_batch=THREADS, verbose=False)
    print("ready", flush=True)
    for _ in sys.stdin:
        llama.reset()
        llama.eval(list(range(3, 3 + CONTEXT)))
        took = []
        for at in range(TOKENS):
            begun = time.perf_counter()
            llama.eval([3 + CONTEXT + at])
            took.append(time.perf_counter() - begun)
        print(median(took), flush=True)


def main() -> None:
    """Read the command line and print a block for each shape."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=[*SHAPES], choices=[*SHAPES], metavar="NAME")
    parser.add_argument("--llama", help="interpreter of an environment with llama-cpp-python")
    parser.add_argument("--work", type=Path, default=Path(tempfile.gettempdir()) / "foredraft-shapes")
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    if (python := given.llama) is None:
        from peers.environments import python_of

        python = str(python_of("llama_cpp", given.work))
    for name in given.names:
        file = written(name, Referee(python, given.work))
        print(f"\n{name}: {file.stat().st_size / 2**20:,.0f} MiB", flush=True)
        here = timed_here(file)
        with subprocess.Popen(  # noqa: S603  # this script, in llama.cpp's environment
            [python, __file__, "--there", str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        ) as there:
            while there.stdout.readline().strip() != "ready":
                pass
            ratios = []
            for _ in range(ROUNDS):
                there.stdin.write("\n")
                there.stdin.flush()
                theirs = float(there.stdout.readline())
                ours = here()
                ratios.append(ours / theirs)
                print(f"a token: foredraft {1e3 * ours:.1f} ms, llama.cpp {1e3 * theirs:.1f} ms", flush=True)
            there.stdin.close()
        print(f"over llama.cpp: {median(ratios):.2f} [{min(ratios):.2f}, {max(ratios):.2f}]", flush=True)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--there"]:
        timed_there(sys.argv[2])
    else:
        main()

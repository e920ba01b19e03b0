"""Tiny GGUF files with random weights, one for each way in which a file says what model it is.

Used by `gguf_referee.py`, which has llama.cpp score them, and by the tests,
which compare foredraft's scores with those.
A case is a row: the tensors of a layer, the sizes, and the keys of the header. Sizes that llama.cpp's code fixes for an
architecture are those of the published models.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

VOCABULARY = 288
"""Tokens of the toy vocabulary: bytes, 29 pairs and 3 special ones, or their like in a SentencePiece vocabulary."""
SEED = 7
_DEEP = 8
"""Layers from here on add a hundredth to the states, so that rounding does not grow with the depth. Chosen."""
_ADDED = (
    "attn_output", "ffn_down", "ssm_out", "post_attention_norm", "post_ffw_norm", "post_norm", "laurel_post_norm",
)  # fmt: skip

Layer = str | Callable[[int], str]


@dataclass(frozen=True)
class Case:
    """A file.

    Attributes:
        name: what the file is about.
        architecture: llama.cpp's name.
        layer: tensors of a block, or a function of its number: "x" has a weight, "x+" also a bias, "x~" only a bias,
            "x!" no suffix, "x%" only a scale.
        keys: values of the header; a key that begins with a point follows the architecture's name. None leaves a key
            out that the others have.
        top: further tensors of the model.
        sizes: see `_sizes`.
        shapes: of tensors that `_shapes` does not know, or has otherwise.
        values: numbers of tensors that are not random; of a bias by its whole name.
        tied: there is no output matrix.
        pieces: the vocabulary is SentencePiece's.
        centred: norms subtract the mean; they have biases if also the last norm is written with "+".
        parts: files to split the tensors into.
        limit: of a difference between two scores over the standard deviation of all scores, to call them the same.
    """

    name: str
    architecture: str
    layer: Layer
    keys: Mapping[str, Any] = field(default_factory=dict)
    top: str = "output_norm output"
    sizes: Mapping[str, int] = field(default_factory=dict)
    shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)
    values: Mapping[str, Sequence[float]] = field(default_factory=dict)
    pieces: bool = False
    centred: bool = False
    parts: int = 1
    limit: float = 5e-3  # llama.cpp's GELU is a table in half precision, which makes 1.5e-3; others are below 3e-4

    @property
    def size(self) -> dict[str, int]:
        """Sizes: width, heads, key heads, head width, inner width, layers, experts, their width, and the context."""
        usual = {"D": 128, "H": 4, "K": 2, "hd": 32, "F": 192, "L": 2, "E": 4, "X": 64, "S": 64, "up": 1, "ctx": 1024}
        return usual | dict(self.sizes)


def tensors_of(case: Case) -> dict[str, np.ndarray]:
    """Return a case's tensors, float32, by name; the same at every call."""
    random, made = np.random.default_rng(SEED), {}
    specs = [("", spec) for spec in ("token_embd", *case.top.split())]
    for number in range(case.size["L"]):
        layer = case.layer if isinstance(case.layer, str) else case.layer(number)
        specs += [(f"blk.{number}.", spec) for spec in layer.split()]
    for prefix, spec in specs:
        name, mark = spec.rstrip("+~!%"), spec[-1]
        shape = _shape(case, name, int(prefix.split(".")[1]) if prefix else 0)
        if mark not in "~%":
            values = _values(case, name, shape, random)
            if prefix and name in _ADDED and int(prefix.split(".")[1]) >= _DEEP:
                values = values / 100
            made[prefix + name + ("" if mark == "!" else ".weight")] = values.astype(np.float32)
        if mark in "+~":
            of_bias = shape[:-1] if len(shape) == 3 or (len(shape) == 2 and mark == "+") else shape
            bias = 0.3 * random.normal(size=of_bias)
            made[f"{prefix}{name}.bias"] = np.array(case.values.get(f"{name}.bias", bias), np.float32)
        if mark == "%":
            of_scale = shape[:1] if name == "ffn_down_exps" else shape[-1:]
            made[f"{prefix}{name}.scale"] = (1 + 0.3 * random.normal(size=of_scale)).astype(np.float32)
    return made


def write(
    case: Case,
    file: Path,
    *,
    without: Sequence[str] = (),
    changed: Mapping[str, Any] | None = None,
    tensors: Mapping[str, np.ndarray] | None = None,
) -> Path:
    """Write a case's file, and return it, or its first part; `without` drops keys and tensors, `changed` has others."""
    import gguf

    sizes, kind = case.size, "" if case.centred else "rms_"
    keys = {
        ".context_length": sizes["ctx"], ".embedding_length": sizes["D"], ".block_count": sizes["L"],
        ".feed_forward_length": sizes["F"], ".attention.head_count": sizes["H"], ".attention.head_count_kv": sizes["K"],
        f".attention.layer_norm_{kind}epsilon": 1e-5, ".rope.freq_base": 10000.0, ".rope.dimension_count": sizes["hd"],
        ".vocab_size": VOCABULARY, **case.keys, **(changed or {}),
    }  # fmt: skip
    found = tensors_of(case) if tensors is None else tensors
    found = {name: values for name, values in found.items() if not name.endswith(tuple(without) or "\0")}
    most = -(-len(found) // case.parts) if case.parts > 1 else 0
    writer = gguf.GGUFWriter(str(file), case.architecture, split_max_tensors=most)
    writer.add_name(case.name)
    writer.add_file_type(0)
    add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
           list: writer.add_array}  # fmt: skip
    for key, value in keys.items():
        if value is not None and not key.endswith(tuple(without) or "\0"):
            add[type(value)](f"{case.architecture}{key}" if key.startswith(".") else key, value)
    _write_vocabulary(case, writer)
    for name, values in found.items():
        writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return file if case.parts == 1 else file.with_name(f"{file.stem}-00001-of-{case.parts:05}.gguf")


def _write_vocabulary(case: Case, writer: Any) -> None:
    if case.pieces:
        gemma = "gemma" in case.architecture
        special = ["<pad>", "<eos>", "<bos>", "<unk>", "<mask>"] if gemma else ["<unk>", "<s>", "</s>", "<|endoftext|>"]
        tokens = [*special, *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz"]
        tokens += [f"▁{letter}" for letter in "ab"][: VOCABULARY - len(tokens)]
        kinds = [3] * len(special) + [6] * 256 + [1] * (VOCABULARY - len(special) - 256)
        writer.add_tokenizer_model("llama")
        writer.add_token_scores([-float(index) for index in range(VOCABULARY)])
    else:
        pairs = [(first, second) for first in "etaoin" for second in "snrhl"][:29]
        fillers = (f"<{number}>" for number in range(VOCABULARY - 256 - len(pairs) - 3))  # of a larger vocabulary
        special = ["<|endoftext|>", "<|pad|>", "<|x|>"]
        tokens = [*_bytes(), *(first + second for first, second in pairs), *fillers, *special]
        kinds = [1] * (VOCABULARY - 3) + [3] * 3
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre("gpt-2")
        writer.add_token_merges([f"{first} {second}" for first, second in pairs])
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(VOCABULARY - 1)
    writer.add_add_bos_token(False)


def _bytes() -> list[str]:
    """Return GPT-2's characters for the 256 bytes: printable ones stand for themselves."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in shown]
    names = {byte: chr(byte) for byte in shown} | {byte: chr(256 + index) for index, byte in enumerate(rest)}
    return [names[byte] for byte in (*shown, *rest)]


def _values(case: Case, name: str, shape: tuple[int, ...], random: np.random.Generator) -> np.ndarray:
    if name in case.values:
        return np.array(case.values[name])
    if name == "ssm_a":
        return -np.exp(random.normal(0, 0.5, shape))
    if len(shape) == 1 or "norm" in name:
        return ("norm" in name or "scale" in name) + 0.3 * random.normal(size=shape)
    spread = 1.0 if "embd" in name else (2 if name in ("attn_q", "attn_k", "attn_qkv") else 1) / shape[-1] ** 0.5
    return random.normal(size=shape) * spread


def _shape(case: Case, name: str, layer: int) -> tuple[int, ...]:
    if name in case.shapes:
        return case.shapes[name]
    if (special := f"{name}.{layer}") in case.shapes:
        return case.shapes[special]
    size = case.size
    wide, queries, keys, inner = size["D"], size["H"] * size["hd"], size["K"] * size["hd"], size["F"]
    experts, expert, shared = size["E"], size["X"], size["S"]
    table = {
        "token_embd": (VOCABULARY, wide), "output": (VOCABULARY, wide), "position_embd": (size["ctx"], wide),
        "attn_q": (queries, wide), "attn_k": (keys, wide), "attn_v": (keys, wide), "attn_qkv": (queries + 2 * keys,
        wide),
        "attn_output": (wide, queries), "attn_q_norm": (size["hd"],), "attn_k_norm": (size["hd"],),
        "attn_sinks": (size["H"],), "ffn_gate": (inner, wide), "ffn_up": (inner * size["up"], wide),
        "ffn_down": (wide, inner), "ffn_gate_inp": (experts, wide), "ffn_gate_exps": (experts, expert, wide),
        "ffn_up_exps": (experts, expert, wide), "ffn_gate_up_exps": (experts, 2 * expert, wide),
        "ffn_down_exps": (experts, wide, expert), "ffn_gate_inp_shexp": (wide,), "ffn_gate_shexp": (shared, wide),
        "ffn_up_shexp": (shared, wide), "ffn_down_shexp": (wide, shared), "exp_probs_b": (experts,),
        "shortconv.conv": (wide, 3), "shortconv.in_proj": (3 * wide, wide), "shortconv.out_proj": (wide, wide),
    }  # fmt: skip
    return table.get(name) or (wide,)


def _llama3(width: int, base: float, factor: float = 32.0, original: int = 8192) -> list[float]:
    """Return Llama 3's factors by its published rule: long waves are stretched, short ones are not, a ramp between."""
    factors = []
    for index in range(width // 2):
        length = 2 * math.pi * base ** (2 * index / width)
        ramp = (original / length - 1) / 3
        factors.append(1.0 if ramp > 1 else factor if ramp < 0 else 1 / ((1 - ramp) / factor + ramp))
    return factors


_LINES = "attn_norm attn_q attn_k attn_v attn_output ffn_norm ffn_gate ffn_up ffn_down"
_BIASED = "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm+ ffn_up+ ffn_down+"
_FUSED = "attn_norm+ attn_qkv+ attn_output+ ffn_norm+ ffn_up+ ffn_down+"
_BEHIND = "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm post_attention_norm ffn_gate ffn_up ffn_down"
_BEHIND += " post_ffw_norm"
_EXPERTS = " ffn_gate_inp ffn_gate_exps ffn_up_exps ffn_down_exps"
_SHARED = " ffn_gate_shexp ffn_up_shexp ffn_down_shexp"
_GEMMA = (
    "attn_norm attn_q attn_k attn_v attn_output post_attention_norm ffn_norm ffn_gate ffn_up ffn_down post_ffw_norm"
)
_NORMED = "attn_norm attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_norm"
_QKV = "attn_norm attn_q+ attn_k+ attn_v+ attn_output ffn_norm ffn_gate ffn_up ffn_down"
_SSM = "attn_norm ssm_in ssm_conv1d+ ssm_dt~ ssm_a! ssm_d! ssm_norm ssm_out"
_DELTA = "attn_qkv attn_gate ssm_conv1d ssm_dt~ ssm_a! ssm_norm ssm_out"
_CENTRED = "output_norm+ output"
_TIED = "output_norm"
_BIG = {"H": 2, "K": 1, "hd": 64}
_WIDE = {"H": 2, "K": 1, "hd": 256}


def _head(width: int) -> dict[str, Any]:
    return {".attention.key_length": width, ".attention.value_length": width}


def _moe(width: int) -> dict[str, Any]:
    return {".expert_count": 4, ".expert_used_count": 2, ".expert_feed_forward_length": width}


_YARN = {".rope.scaling.type": "yarn", ".rope.scaling.factor": 4.0}
_WINDOW = {".attention.sliding_window": 64}
_SCALES = {".logit_scale": 8.0, ".residual_scale": 0.22, ".embedding_scale": 12.0, ".attention.scale": 0.015625}
_GEMMA2 = _head(256) | _WINDOW | {".attn_logit_softcapping": 50.0, ".final_logit_softcapping": 30.0}
_GEMMA3 = _head(256) | _WINDOW | {".rope.freq_base": 1e6}
_GEMMA4 = _head(64) | _WINDOW | {
    ".attention.key_length_swa": 32, ".attention.value_length_swa": 32, ".rope.freq_base": 1e6,
    ".rope.freq_base_swa": 1e4, ".rope.dimension_count": 64, ".rope.dimension_count_swa": 32,
    ".final_logit_softcapping": 30.0,
}  # fmt: skip
_TURNED = {"rope_freqs": [1.0] * 8 + [1e30] * 24}
_SSM_KEYS = {".ssm.conv_kernel": 4, ".ssm.inner_size": 256, ".ssm.state_size": 32, ".ssm.time_step_rank": 8,
             ".ssm.group_count": 1}  # fmt: skip
_SSM_SHAPES = {"ssm_in": (584, 128), "ssm_conv1d": (320, 4), "ssm_dt": (8,), "ssm_a": (8, 1), "ssm_d": (8, 1),
               "ssm_norm": (1, 256), "ssm_out": (128, 256)}  # fmt: skip
_MAMBA = "attn_norm ssm_in ssm_conv1d+ ssm_x ssm_dt+ ssm_a! ssm_d! ssm_out ssm_dt_norm ssm_b_norm ssm_c_norm"
_MAMBA_KEYS = {".ssm.conv_kernel": 4, ".ssm.inner_size": 256, ".ssm.state_size": 16, ".ssm.time_step_rank": 8,
               ".rope.freq_base": None, ".rope.dimension_count": None}  # fmt: skip
_MAMBA_SHAPES = {"ssm_in": (512, 128), "ssm_conv1d": (256, 4), "ssm_x": (40, 256), "ssm_dt": (256, 8),
                 "ssm_a": (256, 16), "ssm_d": (256,), "ssm_out": (128, 256), "ssm_dt_norm": (8,), "ssm_b_norm": (16,),
                 "ssm_c_norm": (16,)}  # fmt: skip
_DELTA_KEYS = _head(64) | {
    ".ssm.conv_kernel": 4, ".ssm.inner_size": 128, ".ssm.state_size": 32, ".ssm.time_step_rank": 4,
    ".ssm.group_count": 2,
    ".full_attention_interval": 4, ".rope.dimension_count": 16,
}  # fmt: skip
_DELTA_SHAPES = {"ssm_dt": (4,), "ssm_a": (4,), "ssm_norm": (32,), "ssm_out": (128, 128), "ssm_conv1d": (256, 4),
                 "attn_q": (512, 128), "attn_qkv": (256, 128), "attn_gate": (128, 128), "ssm_beta": (4, 128),
                 "ssm_alpha": (4, 128), "ssm_ba": (8, 128), "attn_output": (128, 256)}  # fmt: skip
_LATENT = {
    ".attention.kv_lora_rank": 32, ".attention.key_length": 48, ".attention.value_length": 32,
    ".rope.dimension_count": 16,
    ".attention.key_length_mla": 48, ".attention.value_length_mla": 32, ".leading_dense_block_count": 1,
    ".expert_shared_count": 1, ".attention.head_count_kv": 1,
}  # fmt: skip
_LATENT_SHAPES = {
    "attn_q": (192, 128), "attn_q_a": (24, 128), "attn_q_a_norm": (24,), "attn_q_b": (192, 24),
    "attn_kv_a_mqa": (48, 128), "attn_kv_a_norm": (32,), "attn_k_b": (4, 32, 32), "attn_v_b": (4, 32, 32),
    "attn_kv_b": (256, 32), "attn_output": (128, 128),
}  # fmt: skip
_KIMI_SHAPES = {name: shape for name, shape in _LATENT_SHAPES.items() if name != "attn_q"} | {
    "attn_q.3": (192, 128), **{f"ssm_conv1d_{part}": (1, 128, 1, 4) for part in "qkv"}, "ssm_f_a": (32, 128),
    "ssm_f_b": (128, 32), "ssm_beta": (4, 128), "ssm_a": (1, 1, 4, 1), "ssm_dt": (128,), "ssm_g_a": (32, 128),
    "ssm_g_b": (128, 32), "ssm_norm": (32,),
}  # fmt: skip


def _after_dense(attention: str, *, biased: bool = True) -> Callable[[int], str]:
    """Return layers of which the first is dense and the others have experts and a shared one."""
    experts = _EXPERTS + (" exp_probs_b~" if biased else "") + _SHARED
    return lambda number: attention + (experts if number else " ffn_gate ffn_up ffn_down")


def _delta(attention: str, recurrent: str, rest: str) -> Callable[[int], str]:
    kept = "attn_norm post_attention_norm " + rest + " "
    return lambda number: kept + (attention if number % 4 == 3 else recurrent)


def _gemma4(number: int) -> str:
    own = " attn_q_norm" if number > 3 else " attn_k attn_v attn_q_norm attn_k_norm"
    return _GEMMA.replace(" attn_k attn_v", "") + own + " layer_output_scale inp_gate proj post_norm"


_GEMMA4_SHAPES = {
    **{f"attn_q.{number}": (64 if number % 2 == 0 else 128, 128) for number in range(6)},
    **{f"attn_{part}.{number}": (32 if number % 2 == 0 else 64, 128) for part in "kv" for number in range(6)},
    **{f"attn_output.{number}": (128, 64 if number % 2 == 0 else 128) for number in range(6)},
    **{f"attn_{part}_norm.{number}": (32 if number % 2 == 0 else 64,) for part in "qk" for number in range(6)},
    "layer_output_scale": (1,), "rope_freqs": (32,),
}  # fmt: skip
_GEMMA4_PLE = {
    "inp_gate": (16, 128), "proj": (128, 16), "per_layer_token_embd": (VOCABULARY, 96), "per_layer_model_proj": (96,
    128),
    "per_layer_proj_norm": (16,), **{f"ffn_{part}.{number}": (384, 128) for part in ("gate", "up") for number in (4,
    5)},
    **{f"ffn_down.{number}": (128, 384) for number in (4, 5)},
}  # fmt: skip
_ATTENTION = "attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm"

CASES: Sequence[Case] = (
    Case("llama", "llama", _LINES),
    Case("llama tied", "llama", _LINES, top=_TIED, pieces=True),
    Case("llama fused", "llama", "attn_norm attn_qkv attn_output ffn_norm ffn_gate ffn_up ffn_down"),
    Case("llama3", "llama", _LINES, {".rope.freq_base": 5e5}, "output_norm output rope_freqs", _BIG,
         {"rope_freqs": (32,)},
         {"rope_freqs": _llama3(64, 5e5)}),
    Case("llama, other factors", "llama", _LINES, {}, "output_norm output rope_freqs", _BIG, {"rope_freqs": (32,)},
         {"rope_freqs": list(np.linspace(1, 9, 32))}),
    Case("llama linear", "llama", _LINES, {".rope.scaling.type": "linear", ".rope.scaling.factor": 4.0}),
    Case("llama yarn", "llama", _LINES, _YARN | {".rope.scaling.original_context_length": 256}),
    Case("llama yarn with a factor", "llama", _LINES, _YARN | {".rope.scaling.original_context_length": 256,
         ".rope.scaling.attn_factor": 1.3, ".rope.scaling.yarn_attn_factor": 1.7}),
    Case("llama attention bias", "llama",
         "attn_norm attn_q+ attn_k+ attn_v+ attn_output+ ffn_norm ffn_gate ffn_up ffn_down"),
    Case("llama bias of q, k, v", "llama", _QKV),
    Case("llama head width", "llama", _LINES, _head(64), sizes={"hd": 64}, pieces=True),
    Case("llama no rope.dimension_count", "llama", _LINES, {".rope.dimension_count": None}),
    Case("llama in two parts", "llama", _LINES, parts=2),
    Case("mixtral", "llama", "attn_norm attn_q attn_k attn_v attn_output ffn_norm" + _EXPERTS,
         {".expert_count": 4, ".expert_used_count": 2}, sizes={"X": 192}, pieces=True),
    Case("mistral3", "mistral3", _LINES, _head(32) | _YARN | {".rope.scaling.original_context_length": 64,
         ".rope.scaling.yarn_log_multiplier": 1.0, ".attention.temperature_scale": 0.1}),
    Case("qwen2", "qwen2", _QKV, {".rope.freq_base": 1e6, ".rope.dimension_count": None}, _TIED),
    Case("qwen2 yarn", "qwen2", _QKV, _YARN | {".rope.scaling.original_context_length": 32768}),
    Case("qwen2vl", "qwen2vl", _QKV, {".rope.dimension_sections": [4, 6, 6, 0]}),
    Case("qwen2moe", "qwen2moe",
         "attn_norm attn_q+ attn_k+ attn_v+ attn_output ffn_norm" + _EXPERTS + " ffn_gate_inp_shexp"
         + _SHARED, _moe(64) | {".expert_shared_feed_forward_length": 96}, sizes={"S": 96}),
    Case("qwen3", "qwen3", _NORMED + " ffn_gate ffn_up ffn_down", _head(64) | {".rope.freq_base": 1e6}, sizes=_BIG),
    Case("qwen3vl", "qwen3vl", _NORMED + " ffn_gate ffn_up ffn_down", _head(64) | {
         ".rope.dimension_sections": [11, 11, 10, 0], ".n_deepstack_layers": 3}, sizes=_BIG),
    Case("qwen3moe", "qwen3moe", _NORMED + _EXPERTS, _head(64) | _moe(64), sizes=_BIG),
    Case("qwen3vlmoe", "qwen3vlmoe", _NORMED + _EXPERTS, _head(64) | _moe(64) | {
         ".rope.dimension_sections": [11, 11, 10, 0]}, sizes=_BIG),
    Case("gemma", "gemma", _LINES, _head(256), _TIED, _WIDE, pieces=True),
    Case("gemma2", "gemma2", _GEMMA, _GEMMA2, _TIED, _WIDE, pieces=True),
    Case("gemma2 27B", "gemma2", _GEMMA, _GEMMA2 | _head(128), _TIED, {"D": 64, "H": 2, "K": 1, "hd": 128, "L": 46,
         "F": 64},
         pieces=True),
    Case("gemma3", "gemma3", _GEMMA + " attn_q_norm attn_k_norm", _GEMMA3, _TIED, _WIDE | {"L": 6}, pieces=True),
    Case("gemma3 linear", "gemma3", _GEMMA + " attn_q_norm attn_k_norm", _GEMMA3 | {".rope.scaling.type": "linear",
         ".rope.scaling.factor": 8.0}, _TIED, _WIDE | {"L": 6}, pieces=True),
    Case("gemma3n", "gemma3n", _GEMMA + " attn_q_norm attn_k_norm inp_gate proj post_norm altup_correct_coef altup_"
         "correct_scale altup_predict_coef altup_router altup_router_norm laurel_l laurel_r laurel_post_norm",
         _head(32) | _WINDOW | {".rope.freq_base": 1e6, ".altup.active_idx": 0, ".altup.num_inputs": 4,
         ".embedding_length_"
         "per_layer_input": 256, ".attention.shared_kv_layers": 10, ".attention.sliding_window_pattern":
         ([True] * 4 + [False]) * 6, ".activation_sparsity_scale": [1.6448533535003662] * 10 + [-math.inf] * 20},
         "output_norm altup_proj altup_unembd_proj per_layer_token_embd per_layer_model_proj per_layer_proj_norm",
         {"D": 32, "H": 2, "K": 1, "F": 4096, "L": 30}, {
             "altup_proj": (3, 32, 32), "altup_unembd_proj": (3, 32, 32), "per_layer_token_embd": (VOCABULARY, 7680),
             "per_layer_model_proj": (7680, 32), "per_layer_proj_norm": (256,), "inp_gate": (256, 32), "proj": (32,
             256),
             "altup_correct_coef": (4, 4), "altup_predict_coef": (16, 4), "altup_router": (4, 32), "laurel_l": (64, 32),
             "laurel_r": (32, 64)}, pieces=True, limit=2e-2),  # llama.cpp's deviation of activations divides by n - 1
    Case("gemma4", "gemma4", _GEMMA + " attn_q_norm attn_k_norm layer_output_scale", _GEMMA4 | {
         ".attention.sliding_window_pattern": [True, False] * 3, ".embedding_length_per_layer_input": 0,
         ".attention.head_count_kv": [1] * 6}, "output_norm rope_freqs", {"H": 2, "L": 6}, _GEMMA4_SHAPES, _TURNED,
         pieces=True),
    Case("gemma4, keys as values", "gemma4", lambda number: (_GEMMA if number % 2 == 0 else _GEMMA.replace(" attn_v",
         "")) +
         " attn_q_norm attn_k_norm layer_output_scale", _GEMMA4 | {
         ".attention.sliding_window_pattern": [True, False] * 3, ".embedding_length_per_layer_input": 0,
         ".attention.head_count_kv": [2, 1] * 3}, "output_norm rope_freqs", {"H": 2, "L": 6}, _GEMMA4_SHAPES | {
             f"attn_{part}.{number}": (64, 128) for part in "kv" for number in range(6)}, _TURNED, pieces=True),
    Case("gemma4 E2B", "gemma4", _gemma4, _GEMMA4 | {".attention.sliding_window_pattern": [True, False] * 3,
         ".embedding_length_per_layer_input": 16, ".attention.head_count_kv": 1, ".attention.shared_kv_layers": 2,
         ".feed_forward_length": [192] * 4 + [384] * 2},
         "output_norm rope_freqs per_layer_token_embd per_layer_model_proj per_layer_proj_norm", {"H": 2, "L": 6},
         _GEMMA4_SHAPES | _GEMMA4_PLE, _TURNED, pieces=True),
    Case("gemma4 A4B", "gemma4",
         _GEMMA + " attn_q_norm attn_k_norm layer_output_scale ffn_gate_inp ffn_gate_inp% pre_ffw_norm"
         "_2 post_ffw_norm_1 post_ffw_norm_2 ffn_gate_up_exps ffn_down_exps ffn_down_exps%", _GEMMA4 | _moe(64) | {
         ".attention.sliding_window_pattern": [True, False] * 3, ".embedding_length_per_layer_input": 0,
         ".attention.head_count_kv": [1] * 6}, "output_norm rope_freqs", {"H": 2, "L": 6}, _GEMMA4_SHAPES, _TURNED,
         pieces=True),
    Case("phi2", "phi2", _BIASED.replace("ffn_norm+ ", ""), {".rope.dimension_count": 16}, "output_norm+ output+",
         centred=True),
    Case("phi3", "phi3", "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down", sizes={"up": 2}, pieces=True),
    Case("phi4-mini", "phi3", "attn_norm attn_qkv attn_output ffn_norm ffn_up ffn_down", {
         ".rope.scaling.original_context_length": 4096, ".rope.scaling.attn_factor": 1.19, ".rope.dimension_count": 24},
         "output_norm rope_factors_short rope_factors_long", {"up": 2, "ctx": 131072},
         {"rope_factors_short": (12,), "rope_factors_long": (12,)},
         {"rope_factors_short": list(np.linspace(1, 2, 12)), "rope_factors_long": list(np.linspace(1, 40, 12))},
         pieces=True),
    Case("gpt-oss", "gpt-oss",
         "attn_norm attn_q+ attn_k+ attn_v+ attn_output+ attn_sinks post_attention_norm ffn_gate_inp+ "
         "ffn_gate_exps+ ffn_up_exps+ ffn_down_exps+", _head(64) | _moe(64) | {".rope.scaling.type": "yarn",
         ".rope.scaling.factor": 32.0, ".rope.scaling.original_context_length": 4096, ".rope.freq_base": 150000.0,
         ".attention.sliding_window": 128}, sizes={"hd": 64, "L": 4, "F": 64}),
    Case("smollm3", "smollm3", _LINES, {}, _TIED, {"L": 4}),
    Case("granite", "granite", _LINES, _SCALES),
    Case("granitemoe", "granitemoe", "attn_norm attn_q attn_k attn_v attn_output ffn_norm" + _EXPERTS,
         _SCALES | {".expert_count": 4, ".expert_used_count": 2}, sizes={"X": 192}),
    Case("granitemoe with a shared expert", "granitemoe",
         "attn_norm attn_q attn_k attn_v attn_output ffn_norm" + _EXPERTS + _SHARED,
         _SCALES | {".expert_count": 4, ".expert_used_count": 2, ".expert_shared_feed_forward_length": 64},
         sizes={"X": 192}),
    Case("olmo", "olmo", _LINES.replace("attn_norm ", "").replace("ffn_norm ", ""), {}, "output", centred=True),
    Case("olmo2", "olmo2", _BEHIND, shapes={"attn_q_norm": (128,), "attn_k_norm": (64,)}),
    Case("olmo3", "olmo2", _BEHIND, _WINDOW, sizes={"L": 4}, shapes={"attn_q_norm": (128,), "attn_k_norm": (64,)}),
    Case("olmoe", "olmoe", _NORMED + _EXPERTS, {".expert_count": 4, ".expert_used_count": 2}, sizes={"X": 192, "K": 4},
         shapes={"attn_q_norm": (128,), "attn_k_norm": (128,)}),
    Case("command-r", "command-r", "attn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down",
         {".logit_scale": 0.25, ".rope.scaling.type": "none"}, _TIED, centred=True),
    Case("cohere2", "cohere2", "attn_norm attn_q attn_k attn_v attn_output ffn_gate ffn_up ffn_down",
         _WINDOW | {".logit_scale": 0.25}, _TIED, {"L": 4}, centred=True),
    Case("stablelm", "stablelm", "attn_norm+ attn_q+ attn_k+ attn_v+ attn_output ffn_norm+ ffn_gate ffn_up ffn_down",
         {".rope.dimension_count": 8}, _CENTRED, {"K": 4}, centred=True),
    Case("stablelm 12B", "stablelm",
         "attn_norm+ attn_q attn_k attn_v attn_output attn_q_norm attn_k_norm ffn_gate ffn_up "
         "ffn_down", {".rope.dimension_count": 8, ".use_parallel_residual": True}, _CENTRED,
         shapes={"attn_q_norm": (4, 32), "attn_k_norm": (2, 32)}, centred=True),
    Case("starcoder2", "starcoder2", _BIASED, {}, "output_norm+", centred=True),
    Case("gpt2", "gpt2", _FUSED, {}, "output_norm+ position_embd", {"K": 4, "F": 512}, centred=True),
    Case("falcon 7B", "falcon", "attn_norm+ attn_qkv attn_output ffn_up ffn_down", {}, _CENTRED, {"K": 1, "F": 512},
         centred=True),
    Case("falcon 11B", "falcon", "attn_norm+ attn_qkv attn_output ffn_up ffn_down", {}, _CENTRED, {"F": 512},
         centred=True),
    Case("falcon 40B", "falcon", "attn_norm+ attn_norm_2+ attn_qkv attn_output ffn_up ffn_down", {}, _CENTRED,
         {"F": 512},
         centred=True),
    Case("gptneox", "gptneox", _FUSED, {".use_parallel_residual": True, ".rope.dimension_count": 8}, _CENTRED, {"K": 4},
         centred=True),
    Case("nemotron", "nemotron", "attn_norm+ attn_q attn_k attn_v attn_output ffn_norm+ ffn_up ffn_down",
         {".rope.dimension_count": 16}, _CENTRED, centred=True),
    Case("arcee", "arcee", _LINES.replace("ffn_gate ", "")),
    Case("seed_oss", "seed_oss",
         "attn_norm attn_q+ attn_k+ attn_v+ attn_output post_attention_norm ffn_gate ffn_up ffn_down",
         _head(64), sizes={"hd": 64}),
    Case("minimax-m2", "minimax-m2", _NORMED + _EXPERTS + " exp_probs_b~", _head(128) | {".expert_count": 4,
         ".expert_used_count": 2, ".expert_feed_forward_length": 192, ".expert_gating_func": 2,
         ".rope.dimension_count": 64},
         sizes={"H": 2, "K": 1, "hd": 128, "X": 192}, shapes={"attn_q_norm": (256,), "attn_k_norm": (128,)}),
    Case("exaone4", "exaone4", _BEHIND),
    Case("exaone4 32B", "exaone4", _BEHIND,
         _WINDOW | {".attention.sliding_window_pattern": ([True] * 3 + [False]) * 16},
         sizes={"D": 32, "H": 2, "K": 1, "hd": 16, "F": 32, "L": 64}),
    Case("glm4", "glm4", "attn_norm attn_q+ attn_k+ attn_v+ attn_output post_attention_norm ffn_norm ffn_up ffn_down "
         "post_ffw_norm", {".rope.dimension_count": 16}, sizes={"up": 2}),
    Case("glm4moe", "glm4moe", _after_dense("attn_norm attn_q+ attn_k+ attn_v+ attn_output attn_q_norm attn_k_norm "
         "post_attention_norm"), _moe(64) | {".leading_dense_block_count": 1, ".expert_shared_count": 1,
         ".expert_weights_scale": 1.5, ".expert_weights_norm": True, ".expert_gating_func": 2,
         ".rope.dimension_count": 16}),
    Case("glm4moe without dense layers", "glm4moe", "attn_norm attn_q attn_k attn_v attn_output post_attention_norm"
         + _EXPERTS + " exp_probs_b~" + _SHARED, _moe(64) | {".expert_shared_count": 1, ".expert_weights_norm": True,
         ".rope.dimension_count": 16}),  # Solar Open
    Case("deepseek2", "deepseek2",
         _after_dense("attn_norm attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_norm "
         "attn_k_b attn_v_b attn_output ffn_norm"), _moe(64) | _LATENT | {".attention.q_lora_rank": 24,
         ".expert_gating_func": 2, ".expert_weights_scale": 2.5, ".expert_weights_norm": True}, shapes=_LATENT_SHAPES),
    Case("deepseek2 lite", "deepseek2",
         _after_dense("attn_norm attn_q attn_kv_a_mqa attn_kv_a_norm attn_kv_b attn_output "
         "ffn_norm", biased=False), _moe(64) | {key: value for key, value in _LATENT.items() if "_mla" not in key} | {
         ".attention.head_count_kv": 4, ".expert_weights_scale": 1.0}, sizes={"K": 4, "L": 27, "D": 128},
         shapes=_LATENT_SHAPES),
    Case("deepseek2 yarn", "deepseek2",
         _after_dense("attn_norm attn_q_a attn_q_a_norm attn_q_b attn_kv_a_mqa attn_kv_a_"
         "norm attn_k_b attn_v_b attn_output ffn_norm"), _moe(64) | _LATENT | {".attention.q_lora_rank": 24,
         ".expert_gating_func": 2, ".rope.scaling.type": "yarn", ".rope.scaling.factor": 40.0,
         ".rope.scaling.original_context_length": 64, ".rope.scaling.yarn_log_multiplier": 0.1}, shapes=_LATENT_SHAPES),
    Case("deepseek2 lite yarn", "deepseek2", _after_dense("attn_norm attn_q attn_kv_a_mqa attn_kv_a_norm attn_kv_b "
         "attn_output ffn_norm", biased=False), _moe(64) | {key: value for key,
         value in _LATENT.items() if "_mla" not in
         key} | {".attention.head_count_kv": 4, ".expert_weights_scale": 1.0, ".rope.scaling.type": "yarn",
         ".rope.scaling.factor": 40.0, ".rope.scaling.original_context_length": 64,
         ".rope.scaling.yarn_log_multiplier": 0.0707}, sizes={"K": 4, "L": 27, "D": 128}, shapes=_LATENT_SHAPES),
    Case("glm4moe with a drafting head", "glm4moe", lambda number: _after_dense("attn_norm attn_q+ attn_k+ attn_v+ "
         "attn_output attn_q_norm attn_k_norm post_attention_norm")(number) + (" nextn.eh_proj nextn.enorm "
         "nextn.hnorm nextn.shared_head_norm" if
         number == 2 else ""), _moe(64) | {".leading_dense_block_count": 1, ".expert_shared_count": 1,
         ".expert_weights_scale": 1.5, ".expert_weights_norm": True, ".expert_gating_func": 2,
         ".rope.dimension_count": 16,
         ".nextn_predict_layers": 1}, sizes={"L": 3}, shapes={"nextn.eh_proj": (128, 256)}),
    Case("ernie4_5", "ernie4_5", _LINES),
    Case("lfm2", "lfm2", lambda number: "attn_norm ffn_norm ffn_gate ffn_up ffn_down " + (
         _ATTENTION if number % 3 == 2 else "shortconv.conv shortconv.in_proj shortconv.out_proj"),
         {".attention.head_count_kv": [0, 0, 2] * 2, ".shortconv.l_cache": 3}, "token_embd_norm", {"L": 6}),
    Case("lfm2moe", "lfm2moe", lambda number: "attn_norm ffn_norm " + (_EXPERTS + " exp_probs_b~ " if number > 1 else
         "ffn_gate ffn_up ffn_down ") + (_ATTENTION if number % 3 == 2 else "shortconv.conv shortconv.in_proj "
         "shortconv.out_"
         "proj"), _moe(64) | {".attention.head_count_kv": [0, 0, 2] * 2, ".shortconv.l_cache": 3,
         ".leading_dense_block_count": 2, ".expert_gating_func": 2}, "token_embd_norm", {"L": 6}),
    Case("qwen35", "qwen35", _delta(_ATTENTION, _DELTA + " ssm_beta ssm_alpha", "ffn_gate ffn_up ffn_down"),
         _DELTA_KEYS | {".rope.dimension_sections": [3, 3, 2, 0]}, sizes={"L": 4, "hd": 64}, shapes=_DELTA_SHAPES),
    Case("qwen35 with a drafting head", "qwen35", lambda number: _delta(_ATTENTION, _DELTA + " ssm_beta ssm_alpha",
         "ffn_gate ffn_up ffn_down")(number) if number < 4 else _ATTENTION + " attn_norm post_attention_norm ffn_gate "
         "ffn_up ffn_down nextn.eh_proj nextn.enorm nextn.hnorm nextn.shared_head_norm", _DELTA_KEYS | {
         ".rope.dimension_sections": [3, 3, 2, 0], ".nextn_predict_layers": 1}, sizes={"L": 5, "hd": 64},
         shapes=_DELTA_SHAPES | {"nextn.eh_proj": (128, 256)}),
    Case("qwen35moe", "qwen35moe", _delta(_ATTENTION, _DELTA + " ssm_beta ssm_alpha", _EXPERTS + _SHARED +
         " ffn_gate_inp_shexp"), _DELTA_KEYS | _moe(64) | {".rope.dimension_sections": [3, 3, 2, 0],
         ".expert_shared_feed_forward_length": 64}, sizes={"L": 4, "hd": 64}, shapes=_DELTA_SHAPES),
    Case("qwen3next", "qwen3next", _delta(_ATTENTION, _DELTA + " ssm_ba", _EXPERTS + _SHARED + " ffn_gate_inp_shexp"),
         _DELTA_KEYS | _moe(64) | {".expert_shared_feed_forward_length": 64}, sizes={"L": 4, "hd": 64},
         shapes=_DELTA_SHAPES),
    Case("mamba2", "mamba2", _SSM, _SSM_KEYS | {".attention.head_count": 0, ".attention.head_count_kv": None,
         ".feed_forward_length": 0, ".rope.freq_base": None, ".rope.dimension_count": None}, shapes=_SSM_SHAPES),
    Case("granitehybrid", "granitehybrid",
         lambda number: ("attn_norm attn_q attn_k attn_v attn_output" if number % 2 else _SSM)
         + " ffn_norm ffn_gate ffn_up ffn_down", _SSM_KEYS | _SCALES | {".attention.head_count_kv": [0, 2],
         ".rope.scaling.finetuned": False}, shapes=_SSM_SHAPES),
    Case("granitehybrid experts", "granitehybrid",
         lambda number: ("attn_norm attn_q attn_k attn_v attn_output" if number % 2
         else _SSM) + " ffn_norm" + _EXPERTS + _SHARED, _SSM_KEYS | _SCALES | {".attention.head_count_kv": [0, 2],
         ".rope.scaling.finetuned": False, ".expert_count": 4, ".expert_used_count": 2,
         ".expert_shared_feed_forward_length": 64}, sizes={"X": 192}, shapes=_SSM_SHAPES),
    Case("nemotron_h", "nemotron_h", lambda number: (_SSM, "attn_norm attn_q attn_k attn_v attn_output",
         "attn_norm ffn_up ffn_down")[number], _SSM_KEYS | {".attention.head_count_kv": [0, 2, 0],
         ".feed_forward_length": [0, 0, 192], ".attention.layer_norm_epsilon": 1e-5}, sizes={"L": 3},
         shapes=_SSM_SHAPES),
    Case("nemotron_h with short steps", "nemotron_h", lambda number: (_SSM,
         "attn_norm attn_q attn_k attn_v attn_output", "attn_norm ffn_up ffn_down")[number],
         _SSM_KEYS | {".attention.head_count_kv": [0, 2, 0], ".feed_forward_length": [0, 0, 192],
         ".attention.layer_norm_epsilon": 1e-5}, sizes={"L": 3}, shapes=_SSM_SHAPES,
         values={"ssm_dt.bias": [-9.0] * 8}),
    Case("nemotron_h_moe", "nemotron_h_moe", lambda number: (_SSM, "attn_norm attn_q attn_k attn_v attn_output",
         "attn_norm ffn_gate_inp exp_probs_b~ ffn_up_exps ffn_down_exps ffn_up_shexp ffn_down_shexp")[number],
         _SSM_KEYS | _moe(64) | {".attention.head_count_kv": [0, 2, 0], ".feed_forward_length": [0, 0, 64],
         ".attention.layer_norm_epsilon": 1e-5, ".expert_shared_feed_forward_length": 96, ".expert_shared_count": 1,
         ".expert_weights_norm": True, ".expert_weights_scale": 2.5, ".expert_group_count": 1},
         sizes={"L": 3, "S": 96}, shapes=_SSM_SHAPES),
    Case("falcon-h1", "falcon-h1", _LINES.replace("ffn_norm", "ffn_norm!") + _SSM.replace("attn_norm", "").replace(
         " ssm_norm", ""), _head(32) | _SSM_KEYS, shapes=_SSM_SHAPES),
    Case("falcon-h1 normed", "falcon-h1", _LINES.replace("ffn_norm", "ffn_norm!") + _SSM.replace("attn_norm", ""),
         _head(32) | _SSM_KEYS, shapes=_SSM_SHAPES),
    Case("hunyuan-dense", "hunyuan-dense", _NORMED + " ffn_gate ffn_up ffn_down", _head(32) | {
         ".rope.scaling.type": "none", ".rope.scaling.factor": 1.0, ".rope.scaling.original_context_length": 262144}),
    Case("hunyuan-moe", "hunyuan-moe", _NORMED + _EXPERTS + _SHARED, _moe(192) | {".expert_shared_count": 1,
         ".expert_shared_feed_forward_length": 192}, sizes={"X": 192, "S": 192}),
    Case("ernie4_5-moe", "ernie4_5-moe", _after_dense("attn_norm attn_q attn_k attn_v attn_output ffn_norm"),
         _moe(64) | {".leading_dense_block_count": 1, ".interleave_moe_layer_step": 1, ".expert_shared_count": 2,
         ".expert_shared_feed_forward_length": 128}, sizes={"S": 128}),
    Case("dots1", "dots1", _after_dense(_NORMED), _moe(64) | {".leading_dense_block_count": 1,
         ".expert_shared_count": 1, ".expert_weights_scale": 2.5, ".expert_weights_norm": True,
         ".expert_gating_func": 2}, sizes={"K": 4}),
    Case("afmoe", "afmoe", _after_dense(_GEMMA.replace(" ffn_gate ffn_up ffn_down post_ffw_norm", "")
         + " post_ffw_norm attn_q_norm attn_k_norm attn_gate"), _moe(64) | _WINDOW | {".leading_dense_block_count": 1,
         ".expert_shared_count": 1, ".expert_weights_scale": 2.5, ".expert_weights_norm": True,
         ".expert_gating_func": 2}, sizes={"L": 4}, shapes={"attn_gate": (128, 128)}),
    Case("exaone-moe", "exaone-moe", _after_dense(_NORMED), _moe(64) | _WINDOW | {".leading_dense_block_count": 1,
         ".expert_shared_count": 1, ".expert_shared_feed_forward_length": 64, ".expert_weights_scale": 2.5,
         ".expert_weights_norm": True, ".expert_gating_func": 2, ".rope.scaling.type": "none",
         ".attention.sliding_window_pattern": [True, True, True, False], ".nextn_predict_layers": 0}, sizes={"L": 4}),
    Case("internlm2", "internlm2", _LINES, pieces=True),
    Case("minicpm", "minicpm", _LINES, {".logit_scale": 9.0, ".residual_scale": 0.3, ".embedding_scale": 12.0},
         pieces=True),
    Case("jamba", "jamba", lambda number: ("attn_norm attn_q attn_k attn_v attn_output" if number % 2 else _MAMBA)
         + " ffn_norm" + (_EXPERTS if number % 2 else " ffn_gate ffn_up ffn_down"), _MAMBA_KEYS | {
         ".attention.head_count_kv": [0, 2, 0, 2], ".expert_count": 4, ".expert_used_count": 2},
         sizes={"L": 4, "X": 192}, shapes=_MAMBA_SHAPES),
    Case("jamba dense", "jamba", lambda number: ("attn_norm attn_q attn_k attn_v attn_output" if number == 2 else
         _MAMBA) + " ffn_norm ffn_gate ffn_up ffn_down", _MAMBA_KEYS | {".attention.head_count_kv": [0, 0, 2, 0],
         ".expert_count": 1, ".expert_used_count": 1}, sizes={"L": 4}, shapes=_MAMBA_SHAPES),
    Case("kimi-linear", "kimi-linear", lambda number: _after_dense("attn_norm ffn_norm attn_output " + (
         "attn_q attn_kv_a_mqa attn_kv_a_norm attn_k_b attn_v_b" if number == 3 else
         "attn_q attn_k attn_v ssm_conv1d_q ssm_conv1d_k ssm_conv1d_v ssm_f_a ssm_f_b ssm_beta ssm_a! ssm_dt~ ssm_g_a "
         "ssm_g_b ssm_norm"))(number), _moe(64) | _LATENT | {".attention.head_count_kv": [0, 0, 0, 1],
         ".kda.head_dim": 32, ".ssm.conv_kernel": 4, ".expert_gating_func": 2, ".expert_weights_scale": 2.5,
         ".rope.freq_base": None},
         sizes={"L": 4, "K": 4}, shapes=_KIMI_SHAPES),
    Case("apertus", "apertus", _NORMED + " ffn_up ffn_down", {"xielu.alpha_p": [0.3, 0.7], "xielu.alpha_n": [0.2, 0.9],
         "xielu.beta": [0.5, 0.5], "xielu.eps": [-1e-6, -1e-6]}),
    Case("jais2", "jais2", _BIASED, {}, "output_norm+ output", sizes={"K": 4}, centred=True),
    Case("exaone", "exaone", _LINES, {".rope.freq_base": 1e6}, "output_norm output rope_freqs", _BIG,
         {"rope_freqs": (32,)}, {"rope_freqs": _llama3(64, 1e6, 8.0)}),
    Case("llama4", "llama4", lambda number: "attn_norm attn_q attn_k attn_v attn_output ffn_norm" + (
         _EXPERTS + _SHARED if number % 2 else " ffn_gate ffn_up ffn_down"), _moe(64) | {".expert_used_count": 1,
         ".interleave_moe_layer_step": 2, ".leading_dense_block_count": 0}, sizes={"L": 4, "ctx": 16384}),
)  # fmt: skip
"""Files of every architecture that foredraft reads, and of the ways in which those of one differ."""

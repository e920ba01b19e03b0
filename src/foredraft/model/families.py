"""The families of transformers' causal language models that were tried, and why each refused one cannot be verified.

`tests/test_causal_types.py` builds a small model of each family and asserts these tables; the table of
docs/reference/families.md is made from them. Names are transformers' `model_type`. Does not read configurations.
"""

TESTED_FAMILIES = frozenset(
    (
        "afmoe", "apertus", "apertus1p5_text", "arcee", "aria_text", "axk1", "axk2", "bailing_hybrid", "bamba", "beam",
        "bert", "bert-generation", "biogpt", "bitnet", "camembert", "codegen", "cohere", "cohere2", "cohere2_moe",
        "cohere_compass_text", "ctrl", "cwm", "data2vec-text", "dbrx", "deepseek_v2", "deepseek_v3", "deepseek_v32",
        "diffllama", "doge", "dots1", "dots3_note", "dots3_note_text", "electra", "emu3", "ernie", "ernie4_5",
        "ernie4_5_moe", "exaone", "exaone4", "exaone_moe", "falcon", "falcon_h1", "falcon_mamba", "flex_olmo", "flint",
        "fuyu", "gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
        "gemma4_unified", "gemma4_unified_text", "git", "glm", "glm4", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa",
        "got_ocr2", "gpt-sw3", "gpt2", "gpt_bigcode", "gpt_neox", "gpt_neox_japanese", "gpt_oss", "gptj", "granite",
        "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared", "helium", "hrm_text",
        "hunyuan_v1_dense", "hunyuan_v1_moe", "hy_v3", "hy_v4", "hyperclovax", "internlm3", "iquestcoder", "jais2",
        "jamba", "jetmoe", "kimi_linear", "kolibri1", "laguna", "lara_mini", "lfm2", "lfm2_moe", "lfm3", "llama",
        "llama4", "llama4_text", "longcat_flash", "mamba", "mamba2", "megatron-bert", "mellum", "mimo_v2_flash",
        "minicpm3", "minimax_m2", "ministral", "ministral3", "mistral", "mixtral", "mllama", "modernbert-decoder",
        "moss_transcribe_diarize", "nanochat", "nemotron", "nemotron_h", "olmo", "olmo2", "olmo3", "olmo_hybrid",
        "olmoe", "opt", "persimmon", "phi", "phi3", "phi4_multimodal", "phimoe", "qwen2", "qwen2_moe", "qwen3",
        "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_moe", "qwen3_next", "recurrent_gemma",
        "rembert", "roberta", "roberta-prelayernorm", "roc_bert", "sarvam_mla", "sarvam_moe", "seed_oss", "smollm3",
        "solar_open", "stablelm", "starcoder2", "vaultgemma", "whisper", "xglm", "xlm-roberta", "xlm-roberta-xl",
        "xmod", "youtu", "zamba", "zamba2",
    )
)  # fmt: skip
"""Families whose drafted texts equal those of transformers' own `generate`, with small random models."""

DECODERS = frozenset(
    ("bert", "bert-generation", "camembert", "data2vec-text", "electra", "ernie", "megatron-bert", "rembert",
     "roberta", "roberta-prelayernorm", "roc_bert", "xlm-roberta", "xlm-roberta-xl", "xmod")
)  # fmt: skip
"""Those that are encoders, whose tokens attend to later ones, unless their configuration sets `is_decoder`."""

RECURRENT = "keeps a recurrent state by code of its own, which cannot step back after a rejected draft"
ALIBI = "uses ALiBi, which it derives from a row's index in the pass and not from its position"
COMPILED_RECURRENT = frozenset(
    ("bailing_hybrid", "bamba", "falcon_h1", "falcon_mamba", "granitemoehybrid", "jamba", "kimi_linear",
     "lara_mini", "lfm2", "lfm2_moe", "lfm3", "mamba", "mamba2", "nemotron_h", "olmo_hybrid",
     "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next", "zamba2")
)  # fmt: skip
"""Families with recurrent layers whose compiled forwards were tried; others run uncompiled."""

REFUSED_FAMILIES = {
    RECURRENT: ("minimax", "rwkv", "rwkv7", "xlstm", "zaya"),
    ALIBI: ("bloom", "mpt"),
    "derives positions from a row's index in the pass, and takes no others": (
        "bart", "bigbird_pegasus", "blenderbot", "blenderbot-small", "cpmant", "marian", "mbart", "mvp", "pegasus",
        "plbart", "roformer", "trocr", "inkling_text", "inkling2_text",
    ),
    "keeps no keys and values from pass to pass in transformers' cache": ("openai-gpt", "reformer", "xlm", "xlnet"),
    "attends to all tokens in a text's first pass, but to a window of them in later ones": ("moshi",),
    "attends to chosen blocks of tokens in long passes, and to all tokens in short ones": ("big_bird",),
    "predicts several tokens at once, under masks of its own": ("prophetnet",),
    "groups bytes by the predictions of a second model": ("blt",),
    "drafts for another model, whose states it reads": ("gemma4_assistant", "gemma4_unified_assistant"),
    "keeps tokens and states of embeddings by code of its own": ("qwen4_exp", "qwen4_exp_text"),
    "is an encoder-decoder": ("musicgen", "musicgen_melody"),
}  # fmt: skip
"""For each reason, the families that it holds for, whatever else their configuration says."""

RECURRENT_LAYERS = frozenset(("linear_attention", "conv", "hybrid", "hybrid_sliding"))
"""The types of layers that keep a recurrent state."""
INDEXED = "indexed_attention"
"""The type of layers that choose the tokens that they attend to by an index of all slots."""
MASK_NAMES = {"hybrid": "full_attention", "hybrid_sliding": "sliding_attention"}
"""The names of masks that differ from those of the layers."""
UNMASKED_LAYERS = frozenset(("linear_attention", "conv", "mlp", "moe"))
"""The types of layers that attend to no tokens."""

_SUMMARIES = "attends to summaries of tokens that cannot step back after a rejected draft"
LAYER_REASONS = {
    "minimax_m3_sparse": "attends to chosen blocks of tokens, which it counts by their index in the pass",
    **dict.fromkeys(("compressed_sparse_attention", "heavily_compressed_attention"), _SUMMARIES),
    "local_attention": "takes its window from a row's index in the pass, not from its position",
}
"""For each type of layers that is refused, as a configuration's `layer_types` names it, the reason."""

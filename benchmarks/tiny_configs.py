"""Tiny configurations of transformers classes: the default with its sizes lowered, and what single models need beyond that."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig

VOCAB, FIRST = 96, 16  # token ids with a meaning are moved below FIRST

_SIZES = {
    64: """hidden_size d_model n_embd emb_dim embedding_dim embed_dim dim lru_width word_embed_proj_dim hidden_size_global
        attention_hidden_size max_encoder_position_embeddings max_decoder_position_embeddings max_position_embeddings
        n_positions n_ctx max_seq_len context_length model_max_length max_source_positions max_target_positions
        original_max_position_embeddings projection_dim router_hidden_size""",
    128: """intermediate_size ffn_dim decoder_ffn_dim encoder_ffn_dim d_inner dim_ff dff ffn_hidden_size n_inner
        intermediate_size_mlp mamba_d_ssm max_2d_position_embeddings hidden_dim image_text_hidden_size
        dense_intermediate_size mlp_dim feed_forward_size d_ff prompt_mid_dim""",
    VOCAB: """vocab_size vocab_size_per_layer_input decoder_vocab_size audio_vocab_size codebook_size unpadded_vocab_size
        pronunciation_vocab_size shape_vocab_size encoder_hash_byte_group_vocab bias_max_distance relative_max_distance
        position_bias_max_distance relative_attention_max_distance""",
    32: """moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size
        moe_shared_expert_intermediate_size out_hidden_size expert_ffn_hidden_size kv_lora_rank q_lora_rank o_lora_rank
        embedding_size input_embedding_size shared_experts_intermediate_size pronunciation_embed_dim shape_embed_dim
        classifier_proj_size position_bias_num_buckets rel_extent output_embedding_size block_multiple_of""",
    16: """head_dim d_head d_kv dim_head kv_channels qk_nope_head_dim v_head_dim swa_head_dim linear_key_head_dim
        linear_value_head_dim linear_head_dim mamba_d_head mamba_head_dim mamba_headdim index_head_dim mamba_d_state
        state_size ssm_state_size mamba_dt_rank time_step_rank hidden_size_per_layer_input attention_head_size
        global_head_dim chunk_size mamba_chunk_size hc_lowrank""",
    8: """mamba_n_heads mamba_num_heads sliding_window sliding_window_size window_size attention_window_size
        qk_rope_head_dim rotary_dim index_topk attention_chunk_size local_attention local_attention_window_len
        keep_window_size block_size d_rel adapter_rank loop_gate_rank gated_norm_rank laurel_rank
        relative_attention_num_buckets num_buckets prompt_length index_block_size""",
    4: """num_attention_heads n_head n_heads num_heads encoder_attention_heads decoder_attention_heads attention_heads
        num_encoder_attention_heads num_decoder_attention_heads linear_num_value_heads linear_num_heads
        swa_num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts num_query_groups
        index_n_heads decoder_layers encoder_layers num_decoder_layers num_encoder_layers prompt_types segment_types""",
    2: """linear_num_key_heads num_experts_per_tok num_experts_per_token moe_topk moe_k moe_top_k n_group
        num_expert_group n_groups n_shared_experts zero_expert_num o_groups index_topk_blocks""",
    1: "topk_group first_k_dense_replace num_dense_layers num_nextn_predict_layers num_random_blocks",
}
SIZES = {key: size for size, keys in _SIZES.items() for key in keys.split()}
DEPTHS = ("num_hidden_layers", "n_layer", "n_layers", "num_layers", "num_blocks", "depth")
KINDS = ("layer_types", "mlp_layer_types", "layers_block_type")
KV_HEADS = {
    "num_key_value_heads": "num_attention_heads",
    "num_kv_heads": "num_attention_heads",
    "kv_n_heads": "n_heads",
    "swa_num_key_value_heads": "swa_num_attention_heads",
    "num_global_key_value_heads": "num_attention_heads",
}
OFF = ("router_jitter_noise", "input_jitter_noise", "mask_time_prob", "mask_feature_prob")
TOKENS = ("token_id", "token_index", "token_ids", "eod_id")


def shrink(kind: type, changes: dict[str, Any], tokens: dict[int, int]) -> Any:
    """A small configuration. `changes` go in as they are; a dict for a part of it is merged into the shrunk part."""
    try:
        start = kind()
    except Exception:  # some classes have no default that they accept
        start = kind(**changes)
    own = {k: v for k, v in vars(start).items() if not k.startswith("_")}
    parts = {k for k, v in own.items() if isinstance(v, PreTrainedConfig)}
    fixed = {k: v for k, v in changes.items() if not (k in parts and isinstance(v, dict))}
    layers = _layers(own, fixed)
    small: dict[str, Any] = {}
    for key, value in own.items():
        if key in fixed:
            continue
        if key in parts:
            small[key] = shrink(type(value), changes.get(key, {}), tokens)
        elif isinstance(value, list) and layers.lists and key in layers.lists:
            small[key] = [_lower(key, value[i]) for i in layers.kept]
        elif key == "use_cache":
            small[key] = False
        elif isinstance(value, float) and ("drop" in key or key in OFF):
            small[key] = 0.0
        elif key.endswith(TOKENS) and (_integer(value) or isinstance(value, list)):
            small.update(_moved(key, value, tokens))
        elif _integer(value):
            small.update(_number(key, value, own, len(layers.kept)))
    return kind(**{**small, **fixed})


class _Layers:
    def __init__(self, kept: list[int], lists: set[str]) -> None:
        self.kept, self.lists = kept, lists


def _layers(own: dict[str, Any], fixed: dict[str, Any]) -> _Layers:
    """Which layers stay, and which lists have an entry for each."""
    depth = next((own[k] for k in DEPTHS if _integer(own.get(k))), 0)
    lists = {
        k for k, v in own.items() if isinstance(v, list) and len(v) == depth and depth > 3 and k not in fixed
    }
    forced = next((len(fixed[k]) for k in KINDS if fixed.get(k)), 0)
    forced = forced or next((fixed[k] for k in DEPTHS if k in fixed), 0)
    if forced:
        return _Layers(list(range(forced)), lists)
    if not lists:
        return _Layers(list(range(min(depth, 4))), lists)
    return _Layers(
        _enough([str(entry) for entry in zip(*(own[k] for k in sorted(lists)), strict=True)]), lists
    )


def _enough(kinds: list[str], most: int = 8) -> list[int]:
    """The shortest beginning with every kind twice, else once, else two layers of each kind."""
    for wanted in (2, 1):
        for n in range(min(4, len(kinds)), min(most, len(kinds)) + 1):
            if all(kinds[:n].count(kind) >= min(wanted, kinds.count(kind)) for kind in set(kinds)):
                return list(range(n))
    return [i for i, kind in enumerate(kinds) if kinds[:i].count(kind) < 2][:most]


def _integer(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _lower(key: str, value: Any) -> Any:
    return min(value, SIZES[key]) if key in SIZES and isinstance(value, int) else value


def _number(key: str, value: int, own: dict[str, Any], layers: int) -> dict[str, int]:
    if key in DEPTHS:
        return {key: layers}
    if key in KV_HEADS:
        return {key: 4 if value == own.get(KV_HEADS[key]) else min(value, 2)}
    if key == "head_dim" and value == own.get("qk_rope_head_dim"):
        return {key: min(value or 8, 8)}
    return {key: _lower(key, value)} if key in SIZES else {}


def _moved(key: str, value: Any, tokens: dict[int, int]) -> dict[str, Any]:
    """Token ids beyond the small vocabulary get new ones, the same for the same id."""
    old = value if isinstance(value, list) else [value]
    new = [i if 0 <= i < FIRST else tokens.setdefault(i, 4 + len(tokens)) for i in old]
    return {} if new == old else {key: new if isinstance(value, list) else new[0]}


# What single models need. Kinds of layers by letter, for short lists.
LETTERS = {
    "f": "full_attention",
    "s": "sliding_attention",
    "l": "linear_attention",
    "d": "dense",
    "m": "sparse",
    "h": "hybrid",
    "w": "hybrid_sliding",
}


def kinds(letters: str) -> list[str]:
    return [LETTERS[letter] for letter in letters]


ASSISTANT = {
    "layer_types": kinds("sssf"),
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": 4,
    "global_head_dim": 32,
}
CHANGES: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [2], "num_hidden_layers": 5},
    "bloom": {"n_layer": 4},
    "blt": {"encoder_config": {"num_hidden_layers": 3}},
    "cohere2_moe": {
        "layer_types": kinds("sssfs"),
        "mlp_layer_types": kinds("dmmmm"),
        "prefix_dense_intermediate_size": 128,
        "num_shared_experts": 1,
    },
    "deepseek_v2": {
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "n_routed_experts": 4,
        "topk_method": "greedy",
    },
    "dory": {
        "layer_types": kinds("sfsfsf"),
        "n_input_layers": 2,
        "n_recurrent_layers": 2,
        "n_output_layers": 2,
    },
    "dots1": {
        "n_routed_experts": 4,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "moe_intermediate_size": 32,
    },
    "falcon_h1": {"mamba_d_head": 16},
    "gemma3n_text": {
        "layer_types": kinds("ssfssf"),
        "num_kv_shared_layers": 3,
        "activation_sparsity_pattern": [0.95, 0.95, 0.0, 0.0, 0.0, 0.0],
        "intermediate_size": 128,
    },
    "gemma4": {
        "text_config": {
            "layer_types": kinds("sssfsf"),
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
            "attention_k_eq_v": True,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
        },
        "vision_config": {
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 4,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "patch_size": 4,
            "position_embedding_size": 16,
            "pooling_kernel_size": 2,
        },
    },
    "gemma4_assistant": {
        "text_config": {**ASSISTANT, "model_type": "gemma4_text", "num_hidden_layers": 4},
        "backbone_hidden_size": 64,
    },
    "gemma4_text": {
        "layer_types": kinds("sfsfsfsf"),
        "num_kv_shared_layers": 4,
        "use_double_wide_mlp": True,
        "global_head_dim": 32,
    },
    "gemma4_unified_assistant": {
        "text_config": ASSISTANT,
        "backbone_hidden_size": 64,
        "use_ordered_embeddings": True,
        "num_centroids": 8,
        "centroid_intermediate_top_k": 4,
    },
    "got_ocr2": {
        "image_seq_length": 4,
        "vision_config": {
            "image_size": 128,
            "window_size": 4,
            "output_channels": 16,
            "global_attn_indexes": [1, 3],
        },
    },
    "granitemoehybrid": {"layer_types": kinds("llflf")},
    "granitemoeshared": {"shared_intermediate_size": 32},
    "hrm_text": {"num_hidden_layers": 4, "num_layers_per_stack": 3},
    "hunyuan_v1_moe": {"head_dim": 16, "num_experts": 4, "moe_topk": 2},
    "inkling2_loop_text": {
        "loop_layer_index_start": 2,
        "loop_layer_index_end": 4,
        "n_layers_per_attn_res_block": 2,
    },
    "inkling2_text": {"n_layers_per_attn_res_block": 2},
    "jamba": {"num_hidden_layers": 8, "attn_layer_period": 4, "attn_layer_offset": 2},
    "laguna": {
        "layer_types": kinds("fsfsfs"),
        "mlp_layer_types": kinds("dmmmmm"),
        "num_attention_heads_per_layer": [4, 8] * 3,
        "num_key_value_heads": 2,
    },
    "mellum": {"layer_types": kinds("fsssf"), "mlp_layer_types": kinds("mmmmm")},
    "ministral": {"head_dim": 16, "layer_types": kinds("sssf")},
    "minimax_m3_vl_text": {
        "layer_types": [*kinds("ff"), *["minimax_m3_sparse"] * 3],
        "mlp_layer_types": kinds("ddmmm"),
        "dense_intermediate_size": 128,
        "index_block_size": 4,
    },
    "mllama": {"num_hidden_layers": 5, "cross_attention_layers": [1, 3]},
    "moshi": {"audio_encoder_config": {"codebook_size": 64}},
    "nemotron": {"num_key_value_heads": 2, "head_dim": 16},
    "qwen2_moe": {"mlp_only_layers": [0]},
    "qwen3_moe": {"mlp_only_layers": [0]},
    "reformer": {
        "is_decoder": True,
        "attn_layers": ["local", "lsh"] * 2,
        "axial_pos_shape": [4, 4],
        "axial_pos_embds_dim": [32, 32],
        "num_buckets": 4,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "hash_seed": 0,
    },
    "xmod": {"default_language": "en_XX", "languages": ["en_XX", "de_DE"]},
    "zamba2": {
        "attention_hidden_size": 128,
        "attention_head_dim": 32,
        "kv_channels": 16,
        "layers_block_type": kinds("lhlhlhlh"),
        "num_mem_blocks": 2,
        "use_shared_attention_adapter": True,
    },
    "zaya": {"layer_types": kinds("hwhw"), "sliding_window": 8},
}

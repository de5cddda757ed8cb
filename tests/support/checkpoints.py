"""Tiny models with random weights, made on the spot by transformers: one for each kind of module tree or KV cache.

All have the demo model's tokenizer, and weights large enough that layers make a difference.
"""

# mypy: ignore-errors

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import torch

from tests.support import ROOT

__all__ = ["DTYPES", "KINDS", "LAYERS", "make_checkpoint", "make_idefics", "make_lora"]

DEMO = ROOT / "examples" / "demo_model" / "model"
LAYERS, HIDDEN, VOCABULARY = 4, 64, 4096
_COMMON = {
    "vocab_size": VOCABULARY,
    "hidden_size": HIDDEN,
    "intermediate_size": 128,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "initializer_range": 0.2,
}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "router_aux_loss_coef": 0.0}
_MAMBA = {
    "mamba_n_heads": 4,
    "mamba_d_head": 32,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
#: By kind, the dtype that vLLM's kernels for a CPU want it in, where that is not float32.
DTYPES = {"qwen3_next": "bfloat16"}
#: By kind, transformers' configuration class, its model class, and what differs from the common settings.
KINDS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"n_embd": HIDDEN, "n_layer": LAYERS, "n_head": 2, "n_positions": 512, "vocab_size": VOCABULARY},
    ),
    "opt": (
        "OPTConfig",
        "OPTForCausalLM",
        {"ffn_dim": 128, "word_embed_proj_dim": HIDDEN, "do_layer_norm_before": True, "num_attention_heads": 2},
    ),
    "llama": ("LlamaConfig", "LlamaForCausalLM", {}),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        {"sliding_window": 32, "layer_types": ["sliding_attention", "full_attention"] * 2, "query_pre_attn_scalar": 32},
    ),
    "mixtral": ("MixtralConfig", "MixtralForCausalLM", {"num_local_experts": 4, "num_experts_per_tok": 2}),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        "Qwen3MoeForCausalLM",
        {**_EXPERTS, "num_experts": 4, "norm_topk_prob": True, "decoder_sparse_step": 1},
    ),
    "cohere": ("CohereConfig", "CohereForCausalLM", {"num_attention_heads": 2, "tie_word_embeddings": True}),
    "stablelm": ("StableLmConfig", "StableLmForCausalLM", {"num_attention_heads": 2}),
    "mamba2": (
        "Mamba2Config",
        "Mamba2ForCausalLM",
        {"num_heads": 4, "head_dim": 32, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "falcon_h1": ("FalconH1Config", "FalconH1ForCausalLM", {**_MAMBA, "mamba_d_ssm": 128}),
    "granitemoehybrid": (
        "GraniteMoeHybridConfig",
        "GraniteMoeHybridForCausalLM",
        {
            **_MAMBA,
            "num_attention_heads": 2,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 64,
            "residual_multiplier": 0.5,
            "attention_multiplier": 0.17,
        },
    ),
    "nemotron_h": (
        "NemotronHConfig",
        "NemotronHForCausalLM",
        {
            "layers_block_type": ["linear_attention", "mlp", "full_attention", "mlp"],
            "mamba_num_heads": 4,
            "mamba_head_dim": 32,
            "ssm_state_size": 16,
            "n_groups": 1,
            "chunk_size": 16,
        },
    ),
    "qwen3_next": (
        "Qwen3NextConfig",
        "Qwen3NextForCausalLM",
        {
            # All of them for each token: which it has would be a matter of rounding.
            **_EXPERTS,
            "num_experts": 2,
            "norm_topk_prob": True,
            "shared_expert_intermediate_size": 32,
            "layer_types": ["linear_attention", "full_attention"] * 2,
            "linear_num_key_heads": 2,
            "linear_num_value_heads": 4,
            "linear_key_head_dim": 64,
            "linear_value_head_dim": 64,
        },
    ),
}


def _draw(model: Any) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                parameter.normal_(0, parameter.shape[-1] ** -0.5)


def make_checkpoint(kind: str, folder: Path) -> Path:
    """A checkpoint of that kind in `folder / kind`, in float32."""
    import transformers

    config_class, model_class, different = KINDS[kind]
    settings = different if kind == "gpt2" else {**_COMMON, **different}
    settings = {"bos_token_id": 0, "eos_token_id": 0, **settings}
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**settings)
    model = getattr(transformers, model_class)(config).to(torch.float32).eval()
    _draw(model)
    path = folder / kind
    model.save_pretrained(path)
    for file in DEMO.glob("*token*"):
        shutil.copy(file, path)
    return path


def make_idefics(folder: Path) -> Path:
    """A model of images and text: Idefics 3's, whose language model is a Llama. `<image>` becomes 7 positions."""
    import transformers
    from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil

    tokenizer = transformers.AutoTokenizer.from_pretrained(DEMO)
    words = ["<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>"]
    tokenizer.add_special_tokens({"additional_special_tokens": words})
    edge = {"longest_edge": 56}
    config = transformers.Idefics3Config(
        text_config=transformers.LlamaConfig(**{**_COMMON, "vocab_size": VOCABULARY + 64}),
        vision_config={
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": LAYERS + 2,
            "num_attention_heads": 2,
            "image_size": edge["longest_edge"],
            "patch_size": 14,
        },
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
        scale_factor=2,
        pad_token_id=0,
    )
    torch.manual_seed(0)
    model = transformers.Idefics3ForConditionalGeneration(config).to(torch.float32).eval()
    _draw(model)
    path = folder / "idefics"
    model.save_pretrained(path)
    transformers.Idefics3Processor(
        image_processor=Idefics3ImageProcessorPil(do_image_splitting=False, size=edge, max_image_size=edge),
        tokenizer=tokenizer,
        image_seq_len=4,
    ).save_pretrained(path)
    return path


def make_lora(folder: Path, name: str, seed: int, *, scale: float = 0.1, rank: int = 4) -> Path:
    """An adapter of the demo model's `q_proj` and `v_proj`, in PEFT's format, whose effect is not small."""
    import json

    from safetensors.torch import save_file

    config = json.loads((DEMO / "config.json").read_text())
    hidden, width = config["hidden_size"], config["head_dim"]
    sizes = {"q_proj": config["num_attention_heads"] * width, "v_proj": config["num_key_value_heads"] * width}
    generator = torch.Generator().manual_seed(seed)
    weights = {}
    for layer in range(config["num_hidden_layers"]):
        for module, size in sizes.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            weights[f"{stem}.lora_A.weight"] = torch.randn(rank, hidden, generator=generator) * scale
            weights[f"{stem}.lora_B.weight"] = torch.randn(size, rank, generator=generator) * scale
    path = folder / name
    path.mkdir(parents=True)
    save_file(weights, str(path / "adapter_model.safetensors"))
    described = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": "demo", "r": rank}
    described.update(lora_alpha=2 * rank, lora_dropout=0.0, bias="none", target_modules=list(sizes))
    (path / "adapter_config.json").write_text(json.dumps(described))
    return path

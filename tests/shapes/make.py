"""Writes down what transformers' own modules say of the real Gemma 4 models: every tensor's name,
type and shape, and the totals. Nothing is downloaded and no weight exists: the modules are made on
torch's meta device from the published sizes.

Run by hand when a model is added (torch, transformers >= 5.17):

    python tests/shapes/make.py                   writes tests/shapes/NAME.json
    python tests/shapes/make.py --into DIR        also writes DIR/NAME: config.json and sparse
                                                  safetensors files, real headers over a hole

The facts are small because equal layers share a line: `name` has `{}` for the layer's number and
`layers` says which numbers, as in "0-4,6-10". Sizes of the vision towers beyond their number of
layers are the modules' defaults: a text decoder skips them by name.
"""

import argparse
import collections
import json
import math
import pathlib
import re
import struct

import torch
from transformers import Gemma4TextConfig
from transformers.models.gemma4.configuration_gemma4 import Gemma4Config
from transformers.models.gemma4.modeling_gemma4 import Gemma4ForConditionalGeneration
from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedConfig
from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForConditionalGeneration
from transformers.models.gemma4_unified_assistant.configuration_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantConfig)
from transformers.models.gemma4_unified_assistant.modeling_gemma4_unified_assistant import (
    Gemma4UnifiedAssistantForCausalLM)

HERE = pathlib.Path(__file__).parent
S, F = "sliding_attention", "full_attention"
VOCAB = 262144
SHARD = 16 << 30

ROPE = {S: {"rope_type": "default", "rope_theta": 10000.0},
        F: {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1000000.0}}


def layer_types(layers, period):
    return [F if i % period == period - 1 else S for i in range(layers)]


def text(hidden, layers, period, heads, kv, global_kv, intermediate, window, positions, **more):
    return {"vocab_size": VOCAB, "hidden_size": hidden, "num_hidden_layers": layers,
            "layer_types": layer_types(layers, period), "num_attention_heads": heads,
            "num_key_value_heads": kv, "num_global_key_value_heads": global_kv,
            "attention_k_eq_v": global_kv is not None, "head_dim": 256, "global_head_dim": 512,
            "intermediate_size": intermediate, "sliding_window": window,
            "max_position_embeddings": positions, "rms_norm_eps": 1e-6,
            "hidden_activation": "gelu_pytorch_tanh", "attention_bias": False,
            "final_logit_softcapping": 30.0, "tie_word_embeddings": True, "rope_parameters": ROPE,
            "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
            "num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, **more}


PLE = {"hidden_size_per_layer_input": 256, "vocab_size_per_layer_input": VOCAB}
MOE = {"enable_moe_block": True, "num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
BIG = {"use_bidirectional_attention": "vision"}

TARGETS = {
    "e2b": text(1536, 35, 5, 8, 1, None, 6144, 512, 131072, num_kv_shared_layers=20,
                use_double_wide_mlp=True, **PLE),
    "e4b": text(2560, 42, 6, 8, 2, None, 10240, 512, 131072, num_kv_shared_layers=18, **PLE),
    "12b": text(3840, 48, 6, 16, 8, 1, 15360, 1024, 262144, **BIG),
    "26b-a4b": text(2816, 30, 6, 16, 8, 2, 2112, 1024, 262144, **BIG, **MOE),
    "31b": text(5376, 60, 6, 32, 16, 4, 21504, 1024, 262144, **BIG),
}
# Layers of the vision tower; the small models have an audio tower, and clipped linears in both.
VISION = {"e2b": 16, "e4b": 16, "26b-a4b": 27, "31b": 27}
SMALL = {"e2b", "e4b"}

# Width, feed-forward width, query heads of the assistants.
ASSISTANTS = {"e2b": (256, 2048, 4), "e4b": (256, 2048, 4), "12b": (1024, 8192, 16),
              "26b-a4b": (1024, 8192, 16), "31b": (1024, 8192, 32)}


def drop_none(config):
    return {k: v for k, v in config.items() if v is not None}


def target(name):
    """config.json as released, and the module."""
    t = TARGETS[name]
    unified = name == "12b"
    tag = "gemma4_unified" if unified else "gemma4"
    kind = "Gemma4Unified" if unified else "Gemma4"
    config = {"architectures": [f"{kind}ForConditionalGeneration"], "model_type": tag,
              "dtype": "bfloat16", "eos_token_id": [1, 106], "tie_word_embeddings": True,
              "text_config": {"model_type": f"{tag}_text", **t}}
    kwargs = drop_none(t)
    with torch.device("meta"):
        if unified:
            kwargs = {k: v for k, v in kwargs.items() if k != "hidden_size_per_layer_input"}
            model = Gemma4UnifiedForConditionalGeneration(Gemma4UnifiedConfig(text_config=kwargs))
        else:
            vision = dict(num_hidden_layers=VISION[name], use_clipped_linears=name in SMALL,
                          standardize=name not in SMALL)
            audio = {} if name in SMALL else None
            model = Gemma4ForConditionalGeneration(
                Gemma4Config(text_config=kwargs, vision_config=vision, audio_config=audio))
    return config, model.to(torch.bfloat16)


def assistant(name):
    hidden, intermediate, heads = ASSISTANTS[name]
    big = TARGETS[name]
    keep = ("vocab_size", "num_key_value_heads", "num_global_key_value_heads", "attention_k_eq_v",
            "sliding_window", "max_position_embeddings", "head_dim", "global_head_dim", "rope_parameters",
            "rms_norm_eps", "hidden_activation", "attention_bias", "tie_word_embeddings")
    t = {**{k: big[k] for k in keep}, "hidden_size": hidden, "intermediate_size": intermediate,
         "num_attention_heads": heads, "num_hidden_layers": 4, "layer_types": [S, S, S, F],
         "num_kv_shared_layers": 4, "hidden_size_per_layer_input": 0, "vocab_size_per_layer_input": 0,
         "final_logit_softcapping": None}
    ordered = name in SMALL
    tag, kind, config_class, model_class = (
        ("gemma4_unified", "Gemma4Unified", Gemma4UnifiedAssistantConfig, Gemma4UnifiedAssistantForCausalLM)
        if name == "12b" else ("gemma4", "Gemma4", Gemma4AssistantConfig, Gemma4AssistantForCausalLM))
    top = {"backbone_hidden_size": big["hidden_size"], "use_ordered_embeddings": ordered, "num_centroids": 2048,
           "centroid_intermediate_top_k": 32}
    config = {"architectures": [f"{kind}AssistantForCausalLM"], "model_type": f"{tag}_assistant",
              "dtype": "bfloat16", "tie_word_embeddings": True, **top,
              "text_config": {"model_type": f"{tag}_text", **t}}
    kwargs = drop_none(t)
    if name == "12b":
        for key in ("hidden_size_per_layer_input", "vocab_size_per_layer_input"):
            kwargs.pop(key)
        inner = kwargs
    else:
        inner = Gemma4TextConfig(**kwargs)
    with torch.device("meta"):
        model = model_class(config_class(text_config=inner, **top))
    return config, model.to(torch.bfloat16)


DTYPES = {torch.bfloat16: ("BF16", 2), torch.float32: ("F32", 4), torch.int64: ("I64", 8)}


def tensors_of(model):
    """(name, type, shape) of what a file of this model holds: a tied head is not stored."""
    return sorted((n, DTYPES[t.dtype][0], list(t.shape)) for n, t in model.state_dict().items()
                  if n != "lm_head.weight")


def ranges(numbers):
    out, start, last = [], None, None
    for n in [*sorted(numbers), None]:
        if last is not None and n != last + 1 if n is not None else last is not None:
            out.append(str(start) if start == last else f"{start}-{last}")
            start = n
        if start is None:
            start = n
        last = n
    return ",".join(out)


def folded(tensors):
    groups = collections.OrderedDict()
    for name, dtype, shape in tensors:
        found = re.search(r"\.layers\.(\d+)\.", name)
        key = (re.sub(r"\.layers\.\d+\.", ".layers.{}.", name), dtype, tuple(shape))
        groups.setdefault(key, []).append(int(found[1]) if found else None)
    return [{"name": n, **({} if layers == [None] else {"layers": ranges(layers)}), "dtype": d, "shape": list(s)}
            for (n, d, s), layers in groups.items()]


def size(tensors):
    return sum(math.prod(shape) for _, _, shape in tensors)


def target_facts(name):
    config, model = target(name)
    decoder = model.model.language_model
    tensors = tensors_of(model)
    mine = [t for t in tensors if t[0].startswith("model.language_model.")]
    experts = sum(p.numel() for n, p in decoder.named_parameters() if ".experts." in n)
    table = sum(p.numel() for n, p in decoder.named_parameters() if n == "embed_tokens_per_layer.weight")
    moe = TARGETS[name].get("num_experts")
    used = experts * TARGETS[name]["top_k_experts"] // moe if moe else 0
    kv = {S: 0, F: 0}
    for layer, kind in zip(decoder.layers, TARGETS[name]["layer_types"]):
        k, v = getattr(layer.self_attn, "k_proj", None), getattr(layer.self_attn, "v_proj", None)
        if k is not None:
            kv[kind] += k.out_features + (v.out_features if v is not None else k.out_features)
    return {
        "config": config,
        "resaved_text_config": json.loads(decoder.config.to_json_string(use_diff=False)),
        "totals": {"text_tensors": len(mine), "tower_tensors": len(tensors) - len(mine),
                   "text_parameters": size(mine), "tower_parameters": size(tensors) - size(mine),
                   "embedding_parameters": decoder.embed_tokens.weight.numel(),
                   "per_layer_table_parameters": table, "expert_parameters": experts,
                   "active_parameters": size(mine) - table - experts + used,
                   "kv_elements_full": kv[F], "kv_elements_sliding": kv[S]},
        "tensors": folded(tensors),
    }, tensors


def assistant_facts(name):
    config, model = assistant(name)
    tensors = tensors_of(model)
    count = {"tensors": len(tensors), "parameters": size([t for t in tensors if t[1] != "I64"])}
    return {"config": config, "totals": count, "tensors": folded(tensors)}, tensors


def write_sparse(folder, config, tensors):
    """A checkpoint whose files have real headers and no data: a hole of the right size."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    width = {name: bytes for name, bytes in DTYPES.values()}
    shards, filled = [[]], 0
    for name, dtype, shape in tensors:
        bytes = math.prod(shape) * width[dtype]
        if shards[-1] and filled + bytes > SHARD:
            shards.append([])
            filled = 0
        shards[-1].append((name, dtype, shape, bytes))
        filled += bytes
    weight_map = {}
    for i, shard in enumerate(shards, 1):
        file = "model.safetensors" if len(shards) == 1 else f"model-{i:05}-of-{len(shards):05}.safetensors"
        header, at, ordering = {}, 0, None
        for name, dtype, shape, bytes in shard:
            header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes]}
            weight_map[name] = file
            if name == "masked_embedding.token_ordering":
                ordering = at
            at += bytes
        text = json.dumps(header).encode()
        text += b" " * (-len(text) % 8)
        with open(folder / file, "wb") as f:
            f.write(struct.pack("<Q", len(text)) + text)
            f.truncate(8 + len(text) + at)
            if ordering is not None:     # the one tensor whose values say something of its shape
                f.seek(8 + len(text) + ordering)
                f.write(b"".join(struct.pack("<q", i) for i in range(VOCAB)))
    if len(shards) > 1:
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1))


def dump(facts):
    """JSON with one tensor a line."""
    tensors = facts.pop("tensors")
    lines = ",\n  ".join(json.dumps(t) for t in tensors)
    return json.dumps(facts)[:-1] + ',\n "tensors": [\n  ' + lines + "]}\n"


def main():
    arguments = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    arguments.add_argument("--into", type=pathlib.Path, help="also write sparse checkpoints into this folder")
    arguments = arguments.parse_args()
    for name in TARGETS:
        for suffix, made in (("", target_facts(name)), ("-assistant", assistant_facts(name))):
            facts, tensors = made
            if arguments.into:
                write_sparse(arguments.into / (name + suffix), facts["config"], tensors)
            print(name + suffix, json.dumps(facts["totals"]))
            (HERE / f"{name}{suffix}.json").write_text(dump(facts))


if __name__ == "__main__":
    main()

"""Writes the checkpoint in the released layout, and checks it against the transformers library.

`python export.py TARGET_FOLDER [DRAFTER_FOLDER]` reads the weights that the trainers saved and writes config,
generation config and safetensors next to this folder; `--check` runs both models through transformers' classes.
"""

import argparse
import json
import random
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

import render
from model import FULL, SLIDING, Config, Drafter, DrafterConfig, Target
from tokenizer import Encoder
from train import split_load

ASSETS = Path(__file__).parent.parent
STOPS = [1, 106, 50]


def text_config(c):
    """The text configuration with the field names of the released checkpoints."""
    return {
        "model_type": "gemma4_text", "vocab_size": c.vocab, "vocab_size_per_layer_input": c.vocab if c.ple else 0,
        "hidden_size": c.hidden, "intermediate_size": c.inter, "num_hidden_layers": len(c.types),
        "num_attention_heads": c.heads, "num_key_value_heads": c.kv_heads, "num_global_key_value_heads": None,
        "head_dim": c.head_dim, "global_head_dim": c.global_head_dim, "attention_k_eq_v": False,
        "attention_bias": False, "attention_dropout": 0.0, "sliding_window": c.window, "layer_types": list(c.types),
        "num_kv_shared_layers": c.shared, "hidden_size_per_layer_input": c.ple, "use_double_wide_mlp": False,
        "enable_moe_block": False, "final_logit_softcapping": c.softcap, "hidden_activation": "gelu_pytorch_tanh",
        "rms_norm_eps": 1e-6, "max_position_embeddings": c.positions, "initializer_range": 0.02, "use_cache": True,
        "use_bidirectional_attention": None, "tie_word_embeddings": True, "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0,
        "dtype": "bfloat16",
        "rope_parameters": {
            SLIDING: {"rope_type": "default", "rope_theta": 10000.0},
            FULL: {"rope_type": "proportional", "rope_theta": 1000000.0, "partial_rotary_factor": 0.25},
        },
    }


def target_config(c):
    return {"architectures": ["Gemma4ForCausalLM"], **text_config(c), "eos_token_id": [1, 106]}


def drafter_config(c):
    return {
        "architectures": ["Gemma4AssistantForCausalLM"], "model_type": "gemma4_assistant", "backbone_hidden_size": c.backbone,
        "use_ordered_embeddings": True, "num_centroids": c.centroids, "centroid_intermediate_top_k": c.shortlist,
        "tie_word_embeddings": True, "dtype": "bfloat16", "text_config": text_config(c),
    }


def generation_config():
    return {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "bos_token_id": 2, "eos_token_id": STOPS,
            "pad_token_id": 0}


def write_json(path, value):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n")


def bf16(tensors, prefix=""):
    return {prefix + k: (v if v.dtype == torch.int64 else v.bfloat16()).contiguous() for k, v in tensors.items()}


def write_target(weights, to):
    write_json(to / "config.json", target_config(Config()))
    write_json(to / "generation_config.json", generation_config())
    save_file(bf16(weights, "model."), to / "model.safetensors", metadata={"format": "pt"})


def write_drafter(weights, to):
    write_json(to / "assistant" / "config.json", drafter_config(DrafterConfig()))
    write_json(to / "assistant" / "generation_config.json", generation_config())
    save_file(bf16(weights), to / "assistant" / "model.safetensors", metadata={"format": "pt"})


def load_target(folder=ASSETS):
    """Our own model with the exported weights."""
    model = Target(Config())
    model.load_state_dict({k.removeprefix("model."): v.float() for k, v in load_file(folder / "model.safetensors").items()})
    return model.eval()


def load_drafter(folder=ASSETS):
    model = Drafter(DrafterConfig())
    weights = load_file(folder / "assistant" / "model.safetensors")
    model.load_state_dict({k: v if v.dtype == torch.int64 else v.float() for k, v in weights.items()})
    return model.eval()


def dense_attend(window):
    """The target's `attend` for one row, with dense masks."""
    kept = {}

    def attend(owner, kind, q, k, v):
        if k is not None:
            kept[owner] = (k, v)
        keys, values = kept[owner]
        q_at, k_at = torch.arange(len(q))[:, None], torch.arange(len(keys))[None]
        seen = (k_at <= q_at) & (k_at > q_at - window) if kind == SLIDING else k_at <= q_at
        groups = dict(attn_mask=seen, scale=1.0, enable_gqa=True)
        q, keys, values = (t.transpose(0, 1)[None] for t in (q, keys, values))
        return torch.nn.functional.scaled_dot_product_attention(q, keys, values, **groups)[0].transpose(0, 1)

    attend.kept = kept
    return attend


@torch.no_grad()
def check(folder):
    """Largest logit differences to transformers' classes in fp32: target and, if there, three draft steps."""
    from transformers import AutoModelForCausalLM

    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()
    ours, encode, worst = load_target(folder), Encoder(), 0.0
    rows = [render.random_rows(encode, random.Random(seed), 12)[-1] for seed in range(3)]
    for row in rows:
        ids = torch.tensor([t & 0x3FFF for t in row])
        hidden = ours(ids, torch.arange(len(ids)), dense_attend(Config().window), torch.float32)
        reference = theirs(input_ids=ids[None]).logits[0]
        worst = max(worst, (ours.logits(hidden) - reference).abs().max().item())
        print(f"target: {len(ids)} tokens, largest logit difference so far {worst:.2e}, largest logit {reference.abs().max():.1f}")
    assert worst < 1e-2, worst
    if (folder / "assistant" / "model.safetensors").exists():
        check_drafter(folder, ours, [t & 0x3FFF for t in rows[0]])


def check_drafter(folder, ours, row):
    from transformers import AutoModelForCausalLM

    from drafter import draft_row

    theirs = AutoModelForCausalLM.from_pretrained(folder / "assistant", dtype=torch.float32, attn_implementation="eager").eval()
    mine, window, worst = load_drafter(folder), Config().window, 0.0
    for length in (40, 300, len(row) - 5):
        ids = torch.tensor(row[:length])
        attend = dense_attend(window)
        hidden = ours(ids, torch.arange(length), attend, torch.float32)
        kv = {kind: attend.kept[Config().last_owner(kind)] for kind in (SLIDING, FULL)}
        kv[SLIDING] = tuple(t[-window:] for t in kv[SLIDING])
        shared = {kind: tuple(t.transpose(0, 1)[None] for t in pair) for kind, pair in kv.items()}
        mine_hidden = their_hidden = hidden[-1]
        for token in row[length:length + 3]:
            embedded = ours.embed(torch.tensor([token]), torch.float32)[0]
            logits, mine_hidden = draft_row(mine, embedded, mine_hidden, length, kv)
            out = theirs(inputs_embeds=torch.cat([embedded, their_hidden])[None, None], position_ids=torch.tensor([[length]]),
                         shared_kv_states=shared)
            inside = logits > -1e30
            worst = max(worst, (logits - out.logits[0, 0])[inside].abs().max().item())
            their_hidden = out.last_hidden_state[0, 0]
        print(f"drafter: {length} keys, three steps, largest logit difference so far {worst:.2e}")
    assert worst < 1e-2, worst


def main():
    p = argparse.ArgumentParser(description=__doc__)
    p.add_argument("target", type=Path, nargs="?")
    p.add_argument("drafter", type=Path, nargs="?")
    p.add_argument("--to", type=Path, default=ASSETS)
    p.add_argument("--check", action="store_true")
    args = p.parse_args()
    if args.target:
        write_target(split_load(args.target, "target"), args.to)
    if args.drafter:
        write_drafter(split_load(args.drafter, "drafter"), args.to)
    if args.check:
        check(args.to)


if __name__ == "__main__":
    main()

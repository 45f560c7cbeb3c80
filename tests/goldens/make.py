"""Makes the golden checkpoints: tiny random models of every Gemma 4 variant, with what the
reference implementation computes on them.

Run by hand when a variant is added (torch, transformers >= 5.17, safetensors, numpy):

    python tests/goldens/make.py [NAME ...]

Each folder holds a checkpoint in one of the forms met in the field (config.json, weights, an
assistant) and `golden.safetensors`:

    tokens      [prompt + greedy]   a random prompt and the reference's greedy continuation
    logits      [tokens, vocab]     of every position
    prompt      [1]                 length of the prompt
    rounds      [rounds, 2 + K]     committed tokens, accepted drafts, the K drafts of each round
"""

import json
import math
import pathlib
import shutil
import sys

import numpy as np
import torch
from safetensors.torch import save_file

from variants import BASE, DRAFTS, F, GREEDY, HIDDEN, PROMPT, S, VARIANTS, VOCAB, WINDOW

HERE = pathlib.Path(__file__).parent

CENTROIDS = {"e2b": (12, 2), "e4b": (8, 3), "all": (16, 4)}
RESAVED = {"e4b", "12b", "all"}      # config.json as transformers writes it (per_layer_config)
NESTED = {"e2b", "26b"}              # the text decoder inside a multimodal file
SHARDED = {"31b"}                    # two files behind an index


def randomise(model, seed):
    g = torch.Generator().manual_seed(seed)
    for name, t in list(model.named_parameters()) + list(model.named_buffers()):
        if "inv_freq" in name or name.endswith("embed_scale") or "token_ordering" in name:
            continue
        if "q_norm" in name or "k_norm" in name:
            t.copy_(torch.rand(t.shape, generator=g) * 0.6 + 0.5)
        elif "norm" in name or "scale" in name or "layer_scalar" in name:
            t.copy_(torch.rand(t.shape, generator=g) * 0.8 + 0.6)
        else:
            t.copy_(torch.randn(t.shape, generator=g) / math.sqrt(t.shape[-1]))
    if hasattr(model, "lm_head"):
        model.lm_head.weight = model.get_input_embeddings().weight
    return model.float().eval()


def make_target(name):
    kw = {**BASE, **VARIANTS[name], "num_hidden_layers": len(VARIANTS[name]["layer_types"]),
          "attn_implementation": "eager"}
    if name == "12b":
        from transformers.models.gemma4_unified.configuration_gemma4_unified import Gemma4UnifiedTextConfig as C
        from transformers.models.gemma4_unified.modeling_gemma4_unified import Gemma4UnifiedForCausalLM as M
        kw.pop("hidden_size_per_layer_input")
    else:
        from transformers import Gemma4TextConfig as C
        from transformers.models.gemma4.modeling_gemma4 import Gemma4ForCausalLM as M
    return randomise(M(C(**kw)), 7)


def make_assistant(name):
    from transformers import Gemma4TextConfig
    from transformers.models.gemma4_assistant.configuration_gemma4_assistant import Gemma4AssistantConfig
    from transformers.models.gemma4_assistant.modeling_gemma4_assistant import Gemma4AssistantForCausalLM
    v = VARIANTS[name]
    text = {**BASE, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4, "layer_types": [S, S, S, F],
            "num_attention_heads": v.get("num_attention_heads", BASE["num_attention_heads"]),
            "num_key_value_heads": v["num_key_value_heads"], "attention_k_eq_v": v.get("attention_k_eq_v", False),
            "num_global_key_value_heads": v.get("num_global_key_value_heads"), "num_kv_shared_layers": 4,
            "vocab_size_per_layer_input": 0, "final_logit_softcapping": None, "attn_implementation": "eager"}
    count, top_k = CENTROIDS.get(name, (8, 2))
    config = Gemma4AssistantConfig(text_config=Gemma4TextConfig(**text), backbone_hidden_size=HIDDEN,
                                   use_ordered_embeddings=name in CENTROIDS, num_centroids=count,
                                   centroid_intermediate_top_k=top_k)
    model = randomise(Gemma4AssistantForCausalLM(config), 11)
    if name in CENTROIDS:
        order = np.random.default_rng(5).permutation(VOCAB)
        model.masked_embedding.token_ordering.copy_(torch.tensor(order))
    return model, text


def run(model, tokens):
    """Logits of every position, the last hidden state, and the caches a drafter reads."""
    o = model(input_ids=torch.tensor(tokens)[None], use_cache=False, output_hidden_states=True,
              return_shared_kv_states=True)
    return o.logits[0], o.hidden_states[-1][:, -1:], o.shared_kv_states


def draft_steps(target, assistant, tokens, caches, hidden, forced=None):
    """Drafts of a round whose committed tokens are `tokens[:-1]`: one frozen position, keys up to
    it, in sliding layers the newest WINDOW of them."""
    length = len(tokens) - 1
    caches = {F: caches[F], S: tuple(t[:, :, -WINDOW:] for t in caches[S])}
    last, out = torch.tensor([[tokens[-1]]]), []
    for i in range(DRAFTS):
        e = target.get_input_embeddings()(last)
        o = assistant(inputs_embeds=torch.cat([e, hidden], -1), position_ids=torch.tensor([[length]]),
                      shared_kv_states=caches)
        out.append(o)
        hidden = o.last_hidden_state
        last = o.logits.argmax(-1) if forced is None else torch.tensor([[forced[i]]])
    return out


def fit(target, assistant, tokens, steps=40):
    """Teaches the assistant this one continuation, so that some drafts are right and some wrong."""
    cases = []
    for length in range(PROMPT, PROMPT + GREEDY - DRAFTS, 3):
        _, hidden, caches = run(target, tokens[:length])
        cases.append((length, hidden, caches))
    with torch.enable_grad():
        weights = [p for p in assistant.parameters()]
        for p in weights:
            p.requires_grad_(True)
        optimiser = torch.optim.Adam(weights, lr=1e-2)
        for _ in range(steps):
            loss = 0.0
            for length, hidden, caches in cases:
                goal = tokens[length + 1:length + 1 + DRAFTS]
                outs = draft_steps(target, assistant, tokens[:length + 1], caches, hidden, goal)
                for o, g in zip(outs, goal):
                    loss = loss + torch.nn.functional.cross_entropy(o.logits[0], torch.tensor([g]))
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
        for p in weights:
            p.requires_grad_(False)


def rounds(target, assistant, tokens):
    done, out = PROMPT + 1, []
    while done + DRAFTS < len(tokens):
        _, hidden, caches = run(target, tokens[:done - 1])
        outs = draft_steps(target, assistant, tokens[:done], caches, hidden)
        drafts = [int(o.logits.argmax()) for o in outs]
        accepted = 0
        while accepted < DRAFTS and drafts[accepted] == tokens[done + accepted]:
            accepted += 1
        out.append([done - 1, accepted, *drafts])
        done += accepted + 1
    return out


def tensors(model, prefix="model."):
    return {n: t.detach().clone().contiguous() for n, t in model.state_dict().items()
            if n != "lm_head.weight" and "inv_freq" not in n and not n.endswith("embed_scale")}


def write_target(name, model, folder):
    weights = tensors(model)
    if name in NESTED:
        weights = {n.replace("model.", "model.language_model.", 1): t for n, t in weights.items()}
        weights["model.vision_tower.patch_embedder.weight"] = torch.zeros(2, 2)
        weights["model.embed_vision.embedding_projection.weight"] = torch.zeros(2, 2)
    if name in SHARDED:
        names = sorted(weights)
        parts = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, part in parts.items():
            save_file({n: weights[n] for n in part}, folder / file)
        index = {"metadata": {}, "weight_map": {n: file for file, part in parts.items() for n in part}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    else:
        save_file(weights, folder / "model.safetensors")
    if name in RESAVED:
        config = json.loads(model.config.to_json_string(use_diff=False))
        for key in ("_name_or_path", "transformers_version", "id2label", "label2id"):
            config.pop(key, None)
    else:
        v = VARIANTS[name]
        text = {**BASE, **v, "model_type": "gemma4_text", "num_hidden_layers": len(v["layer_types"]),
                "num_global_key_value_heads": v.get("num_global_key_value_heads"),
                "rope_parameters": {S: {"rope_type": "default", "rope_theta": 10000.0},
                                    F: {"rope_type": "proportional", "rope_theta": 1000000.0,
                                        "partial_rotary_factor": 0.25}}}
        config = text
        if name in NESTED:
            config = {"model_type": "gemma4", "architectures": ["Gemma4ForConditionalGeneration"],
                      "eos_token_id": [1, 94], "text_config": text, "vision_config": {"hidden_size": 2}}
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    generation = {"do_sample": True, "temperature": 1.0, "top_k": 64, "top_p": 0.95, "eos_token_id": [1, 94, 50]}
    (folder / "generation_config.json").write_text(json.dumps(generation))


def write_assistant(name, model, text, folder):
    folder.mkdir()
    save_file(tensors(model), folder / "model.safetensors")
    count, top_k = CENTROIDS.get(name, (8, 2))
    kind = "gemma4_unified_assistant" if name == "12b" else "gemma4_assistant"
    text = {k: v for k, v in text.items() if k != "attn_implementation"}
    config = {"model_type": kind, "backbone_hidden_size": HIDDEN, "use_ordered_embeddings": name in CENTROIDS,
              "num_centroids": count, "centroid_intermediate_top_k": top_k,
              "text_config": {**text, "model_type": "gemma4_text"}}
    (folder / "config.json").write_text(json.dumps(config, indent=1))


def make(name):
    folder = HERE / name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    target = make_target(name)
    tokens = np.random.default_rng(4).integers(3, VOCAB, PROMPT).tolist()
    for _ in range(GREEDY):
        logits, _, _ = run(target, tokens)
        tokens.append(int(logits[-1].argmax()))
    logits, _, _ = run(target, tokens)
    top = logits.topk(2).values
    margin = (top[:, 0] - top[:, 1])[PROMPT - 1:-1].min().item()
    assistant, text = make_assistant(name)
    fit(target, assistant, tokens)
    table = rounds(target, assistant, tokens)
    write_target(name, target, folder)
    write_assistant(name, assistant, text, folder / "assistant")
    save_file({"tokens": torch.tensor(tokens, dtype=torch.int64), "logits": logits.clone().contiguous(),
               "prompt": torch.tensor([PROMPT]), "rounds": torch.tensor(table, dtype=torch.int64)},
              folder / "golden.safetensors")
    print(f"{name}: smallest greedy margin {margin:.1e}, accepted by round {[r[1] for r in table]}", flush=True)


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    for wanted in sys.argv[1:] or VARIANTS:
        make(wanted)

"""The shapes of the golden checkpoints: one for every Gemma 4 variant."""

S, F = "sliding_attention", "full_attention"
WINDOW, VOCAB, HIDDEN, PROMPT, GREEDY, DRAFTS = 6, 96, 32, 41, 24, 3

BASE = dict(vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=40, num_attention_heads=4, head_dim=8,
            global_head_dim=16, sliding_window=WINDOW, max_position_embeddings=128, rms_norm_eps=1e-6,
            final_logit_softcapping=30.0, hidden_size_per_layer_input=0, tie_word_embeddings=True,
            hidden_activation="gelu_pytorch_tanh", attention_bias=False)

VARIANTS = {
    "e2b": dict(num_key_value_heads=1, layer_types=[S, F, S, F], num_kv_shared_layers=2, use_double_wide_mlp=True,
                hidden_size_per_layer_input=6, vocab_size_per_layer_input=VOCAB),
    "e4b": dict(num_key_value_heads=2, layer_types=[S, S, F, S, S, F], num_kv_shared_layers=2,
                hidden_size_per_layer_input=4, vocab_size_per_layer_input=VOCAB),
    "12b": dict(num_key_value_heads=2, num_global_key_value_heads=1, layer_types=[S, S, F], attention_k_eq_v=True,
                use_bidirectional_attention="vision"),
    "26b": dict(num_key_value_heads=2, num_global_key_value_heads=1, layer_types=[S, S, F], attention_k_eq_v=True,
                enable_moe_block=True, num_experts=8, top_k_experts=3, moe_intermediate_size=20),
    "31b": dict(num_key_value_heads=4, num_global_key_value_heads=2, layer_types=[S, S, S, F],
                attention_k_eq_v=True),
    # Query heads per key head as in the real 12B: 2 in sliding layers, 16 in full ones.
    "groups": dict(num_attention_heads=16, num_key_value_heads=8, num_global_key_value_heads=1,
                   layer_types=[S, S, F], attention_k_eq_v=True),
    "all": dict(num_key_value_heads=4, num_global_key_value_heads=2, layer_types=[S, S, F, S, S, F],
                num_kv_shared_layers=3, attention_k_eq_v=True, hidden_size_per_layer_input=6,
                vocab_size_per_layer_input=VOCAB, use_double_wide_mlp=True, enable_moe_block=True, num_experts=6,
                top_k_experts=2, moe_intermediate_size=12, final_logit_softcapping=20.0),
}

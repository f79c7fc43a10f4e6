"""Model families as data: one module each, no tensors; `core.registry.model_registry` finds them.

Every family lists its weights under the same names, all that a framework needs to know. Matrices
are (out, in); {i} is a layer; D hidden, F feed-forward, V vocabulary, N heads, K kv heads, H head
dim, P positions. A bias exists where the named setting of the config says so.

    embed.weight                         (V, D)
    position.weight                      (P, D)      learned positions: config.rope is None
    token_type.weight                    (Y, D)      config.encoder: Y token types
    embed_norm.weight            .bias   (D,)        config.encoder: on the sum of the tables
    rope.factors                         (H / 2,)    config.rope.kind == "factors": frequencies
                                                     are divided by it
    layers.{i}.attn_norm.weight  .bias   (D,)        bias: config.norm == "layer"
    layers.{i}.attn.q.weight     .bias   (N * H, D)  bias: config.qkv_bias
    layers.{i}.attn.k.weight     .bias   (K * H, D)
    layers.{i}.attn.v.weight     .bias   (K * H, D)
    layers.{i}.attn.qkv.weight   .bias   (3 * D, D)  gpt2: rows of q, then k, then v
    layers.{i}.attn.o.weight     .bias   (D, N * H)  bias: config.out_bias
    layers.{i}.attn.q_norm.weight        (H,)        config.qk_norm
    layers.{i}.attn.k_norm.weight        (H,)
    layers.{i}.mlp_norm.weight   .bias   (D,)        bias: config.norm == "layer"
    layers.{i}.mlp.gate.weight   .bias   (F, D)      config.gated_mlp; bias: config.mlp_bias
    layers.{i}.mlp.up.weight     .bias   (F, D)
    layers.{i}.mlp.down.weight   .bias   (D, F)
    norm.weight                  .bias   (D,)        bias: config.norm == "layer"; no encoder has it
    head.weight                          (V, D)      absent with config.tie_embeddings

An encoder's norms stand behind the half of a block that they are named after, not before it.
"""

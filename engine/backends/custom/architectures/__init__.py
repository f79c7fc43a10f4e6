"""Model families as data: one entry each, grouped by lineage, no tensors. They are found through
`core.registry.model_registry`.

Every family lists its weights under the same names, so frameworks need no other. Matrices
are (out, in); {i} is a layer; D hidden, F feed-forward, V vocabulary, N heads, K KV heads, H head
dim, P positions. A bias exists where the named config field says so.

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
    layers.{i}.attn.qkv.weight   .bias   (3 * D, D)  config.fused_qkv: rows of q, then k, then v
    layers.{i}.attn.o.weight     .bias   (D, N * H)  bias: config.out_bias
    layers.{i}.attn.q_norm.weight        (H,)        config.qk_norm == "head";
    layers.{i}.attn.k_norm.weight        (H,)        "whole": (N * H,) and (K * H,)
    layers.{i}.mlp_norm.weight   .bias   (D,)        bias: config.norm == "layer"
    layers.{i}.mlp.gate.weight   .bias   (F, D)      config.gated_mlp; bias: config.mlp_bias
    layers.{i}.mlp.up.weight     .bias   (F, D)
    layers.{i}.mlp.down.weight   .bias   (D, F)
    norm.weight                  .bias   (D,)        bias: config.norm == "layer"; no encoder has it
    head.weight                          (V, D)      absent with config.tie_embeddings

`config.norm_placement` says where attn_norm and mlp_norm apply: to the input of attention and MLP,
to their output, or to the sum of output and residual stream.
"""

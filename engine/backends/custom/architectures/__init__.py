"""Model families as data, without tensors. Each module describes the families of one lineage, such
as Llama and its descendants. `core.registry.model_registry` finds the families in these modules.

All families use the same weight names, which are listed here. Matrices are (out, in), and {i} is
the layer number. Sizes: D hidden, F feed-forward, V vocabulary, N heads, K KV heads, H head dim,
P positions. The last column names the config field that decides whether a weight or bias exists.

    embed.weight                         (V, D)
    position.weight                      (P, D)      learned positions: config.rope is None
    token_type.weight                    (Y, D)      config.encoder: Y token types
    embed_norm.weight            .bias   (D,)        config.encoder: on the sum of the tables
    rope.factors                         (H / 2,)    config.rope.kind == "factors": divides
                                                     the RoPE frequencies
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
    norm.weight                  .bias   (D,)        decoders only; bias: config.norm == "layer"
    head.weight                          (V, D)      absent with config.tie_embeddings

`config.norm_placement` says what attn_norm and mlp_norm normalize. "input": the input of attention
and MLP (pre-norm). "output": the output of attention and MLP. "sum": the sum of that output and the
residual stream (post-norm).
"""

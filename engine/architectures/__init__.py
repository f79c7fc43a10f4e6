"""Model families as data, without tensors. Each module describes the families of one lineage, such
as Llama and its descendants. `core.registry.model_registry` finds the families in these modules.

All families use the same weight names, which are listed here. Matrices are (out, in), and {i} is
the layer number. Sizes: D hidden, F feed-forward, V vocabulary, N heads, K KV heads, H head dim,
R rotated dimensions of a head, P positions. The last column names the config field that decides
whether a weight or bias exists.

    embed.weight                         (V, D)
    position.weight                      (P, D)      config.learned_positions
    token_type.weight                    (Y, D)      config.encoder.num_token_types: Y token types
    embed_norm.weight            .bias   (D,)        config.encoder: on the sum of the tables
    rope.factors                         (R / 2,)    config.rope.kind == "factors": frequencies
                                                     are divided by it
    layers.{i}.attn_norm.weight  .bias   (D,)        bias: config.norm_bias
    layers.{i}.attn.q.weight     .bias   (N * H, D)  bias: config.qkv_bias
    layers.{i}.attn.k.weight     .bias   (K * H, D)
    layers.{i}.attn.v.weight     .bias   (K * H, D)
    layers.{i}.attn.o.weight     .bias   (D, N * H)  bias: config.out_bias
    layers.{i}.attn.q_norm.weight        (H,)        config.qk_norm == "head";
    layers.{i}.attn.k_norm.weight        (H,)        "whole": (N * H,) and (K * H,)
    layers.{i}.attn.sinks                (N,)        config.attention_sinks
    layers.{i}.attn.gate.weight  .bias   (N * H, D)  config.attention_gate
    layers.{i}.mixer.in.weight   .bias   (J, D)      instead of attn, if config.layer(i).mixer keeps
                                                     a state: the input projection. `states.py` has
                                                     the sizes; bias: config.state.proj_bias
    layers.{i}.mixer.conv.weight .bias   (C, L)      C channels; bias: config.state.conv_bias
    layers.{i}.mixer.dt_bias             (heads,)    mixers "mamba2" and "delta"
    layers.{i}.mixer.decay               (heads,)    the same; all values are negative
    layers.{i}.mixer.skip                (heads,)    only "mamba2"
    layers.{i}.mixer.norm.weight         (I,)        "mamba2": all heads; "delta": (head dim,)
    layers.{i}.mixer.o.weight    .bias   (D, I)      the output projection
    layers.{i}.mixer.{q,k,v,gate,beta,alpha}.weight  "delta": instead of mixer.in
    layers.{i}.attn.q_a.weight           (Q, D)      config.latent.q_rank: instead of q, a vector of
    layers.{i}.attn.q_a_norm.weight      (Q,)        size Q, its norm, and the matrix that makes
    layers.{i}.attn.q_b.weight           (q, Q)      queries of it; q is N * (M + R)
    layers.{i}.attn.kv_a.weight          (L + R, D)  config.latent: instead of k and v, the latent
    layers.{i}.attn.kv_norm.weight       (L,)        of size L and the rotated key; the norm of the
    layers.{i}.attn.k_up.weight          (N, L, M)   latent; the matrices that turn queries of M
    layers.{i}.attn.v_up.weight          (N, U, L)   values to latents, and latents to values; o is
                                                     (D, N * U)
    layers.{i}.attn_out_norm.weight      (D,)        config.norm_placement == "both": the norm of
                                                     the output; attn_norm is that of the input
    layers.{i}.mlp_norm.weight   .bias   (D,)        absent with config.parallel == "shared"
    layers.{i}.mlp_out_norm.weight       (D,)        config.norm_placement == "both"
    layers.{i}.mlp.gate.weight   .bias   (F, D)      config.gated_mlp; bias: config.mlp_bias
    layers.{i}.mlp.up.weight     .bias   (F, D)
    layers.{i}.mlp.down.weight   .bias   (D, F)
    layers.{i}.experts.router.weight .bias (E, D)    instead of mlp, if config.layer(i).experts;
                                                     E experts of intermediate size X
    layers.{i}.experts.correction        (E,)        config.experts.correction
    layers.{i}.experts.gate.weight .bias (E, X, D)   bias (E, X): config.experts.bias
    layers.{i}.experts.up.weight   .bias (E, X, D)
    layers.{i}.experts.down.weight .bias (E, D, X)   bias (E, D)
    layers.{i}.shared.gate.weight        (S, D)      config.experts.shared_size
    layers.{i}.shared.up.weight          (S, D)
    layers.{i}.shared.down.weight        (D, S)
    layers.{i}.shared.router.weight      (1, D)      config.experts.shared_gate
    norm.weight                  .bias   (D,)        bias: config.norm_bias; no post-norm encoder
                                                     has it
    score.dense.weight           .bias   (D, D)      config.encoder.head; bias: head.bias
    score.norm.weight                    (D,)        config.encoder.head.norm
    score.out.weight             .bias   (1, D)      config.encoder.head
    head.weight                          (V, D)      absent with config.tie_embeddings

`config.norm_placement` says what attn_norm and mlp_norm normalize. "input": the input of attention
and MLP (pre-norm). "output": the output of attention and MLP. "sum": the sum of that output and the
residual stream (post-norm).
"""

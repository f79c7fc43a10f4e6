// `Kernels`: the kernels of one instruction set, as a table of function pointers. A table starts as a copy
// of the next lower instruction set's table. Kernels that are faster with this instruction set replace the
// copied ones. `dispatch.cpp` fills one table for each instruction set of the CPU.
//
// Numerics. A matmul runs in one of five modes. The mode of a token depends on the weight layout
// and on whether the token is prefill or decode. With `--numerics fast`, the mode also depends on
// the number of tokens in the step.
//   F32   float activations, weights dequantized to float, float accumulators
//   INT8  activations quantized to int8 in groups of 32. The dot product of a group is an exact integer.
//         Groups are scaled and accumulated in float, in ascending order.
//   BF16  activations and dequantized weights rounded to bfloat16, float accumulators
//   INT8_OUTLIERS  like INT8, but the largest activation of a group stays float if it has more than half of the
//         group's sum of squares (outliers.h).
//   INT8_PER_CHANNEL  weights of layout I8, which have one scale per output channel. Activations are
//         Hadamard-rotated like the weights (hadamard.h) and quantized to int8 with one scale per row.
//         The integer dot product over all of K is exact.
// In each mode, the result of a token is bit-identical in every batch: it depends neither on the
// number of tokens in the matmul nor on the other tokens.
#pragma once
#include "base/layout.h"
#include "executor/batch.h"
#include "recurrent/recurrent.h"

namespace engine {

enum class Numerics : uint8_t { F32, INT8, BF16, INT8_OUTLIERS, INT8_PER_CHANNEL };
constexpr int kNumerics = 5;

// SwigluOai is for gated matmuls only: it also clamps the up values and adds 1 to them.
enum class Activation : uint8_t { None, Silu, Gelu, GeluTanh, Relu2, SwigluOai };

constexpr float kSwigluLimit = 7.0f, kSwigluAlpha = 1.702f;  // of Activation::SwigluOai

// The epilogue of a matmul: what happens to the accumulators before they are stored.
struct Epilogue {
    float* out;         // output row r starts at out + r * stride
    int stride;         // distance between output rows, in floats
    const float* bias;  // one value per output channel, padded to whole panels; null: no bias
    Activation activation;
    // Whether the panels of the weights (16 output channels each) are (gate, up) pairs. A pair gives
    // 16 outputs: activation(gate) * up.
    bool gated;
    bool residual;  // true: the result is added to `out`; false: the result overwrites `out`
    // What LoRA adapters add to the accumulators of each row, with the panels of the weights; null: nothing.
    // Row r starts at delta + r * delta_stride.
    const float* delta = nullptr;
    int delta_stride = 0;
};

// An activation that is multiplied in float beside the quantized ones of its row.
struct Outlier {
    int32_t column;
    float value;
};

struct MatmulJob {
    const Matrix* weights;
    const uint8_t* input;  // packed activations, written by `pack` of the same table and numerics
    int rows;              // number of rows of activations; each row is one token
    Epilogue epilogue;
    // INT8_OUTLIERS: one list of outliers per row (outliers.h). Null in the other modes.
    const Outlier* outliers = nullptr;
};

// Ranks [first, first + count) are those of LoRA matrix B that can differ from zero in a panel of 16 output
// channels. In groups of kGroup, they are the groups from `group` on. The panel's values begin at index `offset`.
// As floats, they are 16 channels of each rank. As bytes, they are a block for each group of ranks:
//     [ranks / 4, rounded up][16 channels][4 ranks] uint8 with an offset of 128, then a float scale per channel
struct RankPanel {
    int32_t offset, first, count, group;

    int byte_blocks() const { return div_up(count, kGroup); }
    // Bytes of all blocks. A word has four ranks.
    int bytes() const { return 64 * (div_up(count, 4) + byte_blocks()); }
};

constexpr int kHiddenFloats = 36;  // size of a group of ranks that `pack_hidden` has quantized

// Computes B h for rows of h, where B is the second matrix of a LoRA adapter.
struct ExpandJob {
    const RankPanel* panels;
    const float* floats;   // the values of B; null: they are in `bytes`
    const uint8_t* bytes;  // in this case, `pack_hidden` has written the rows of h
    const float* hidden;   // h of row r starts at hidden + r * hidden_stride
    int hidden_stride, rows;
    float* out;  // panel p of row r starts at out + r * stride + 16 p
    int stride;
};

enum class KvType : uint8_t { F32, BF16, INT8 };

// The paged KV cache. A tile holds 16 tokens of one kv head. Each layer and block stores the keys of all kv
// heads, then the values of all kv heads. Each kv head has block_size / 16 tiles. `dim` is head_dim rounded
// up to 32; the padding is zero. In a key tile the vector lanes are tokens. In a value tile the vector lanes
// are dimensions:
//   F32   keys [dim][16], values [16][dim]
//   BF16  keys [dim / 2][16][2], values [8 token pairs][dim][2]
//   INT8  keys [dim / 4][16][4], values [4 token quads][dim][4], each followed by one float scale per token
//
// If `latent` is above 0, no values are stored. The first `latent` dimensions of a key are its value.
struct KvCache {
    KvType type;
    int layers, kv_heads, head_dim, block_size;
    int64_t blocks;
    uint8_t* data;
    int latent = 0;

    int dim() const { return round_up(head_dim, 32); }
    size_t tile_bytes() const {  // the same for keys and values
        size_t values = size_t(dim()) * 16;
        return type == KvType::F32 ? values * 4 : type == KvType::BF16 ? values * 2 : values + 64;
    }
    size_t part_bytes() const { return tile_bytes() * size_t(block_size / 16) * size_t(kv_heads); }
    // Bytes from a key tile to the value tile of the same tokens.
    size_t value_distance() const { return latent > 0 ? 0 : part_bytes(); }
    size_t block_bytes() const { return part_bytes() + value_distance(); }
    size_t bytes() const { return block_bytes() * size_t(blocks) * size_t(layers); }
    uint8_t* key_tile(int layer, int64_t block, int head, int tile) const {
        size_t where = (size_t(layer) * size_t(blocks) + size_t(block)) * block_bytes();
        return data + where + (size_t(head) * size_t(block_size / 16) + size_t(tile)) * tile_bytes();
    }
    uint8_t* value_tile(int layer, int64_t block, int head, int tile) const {
        return key_tile(layer, block, head, tile) + value_distance();
    }
};

struct AttentionShape {
    int heads, kv_heads, head_dim;
    float scale;
    int window;                     // sliding window in tokens, including the query's own token; 0: no window
    float softcap = 0;              // scores become softcap * tanh(score / softcap); 0: no cap
    const float* slopes = nullptr;  // (heads) ALiBi: slope * distance is subtracted from scores; or null
    const float* sinks = nullptr;   // (heads) a logit that only adds to the sum of softmax; or null
    bool centered = false;          // the window reaches as far after the token as before it
    int latent = 0;                 // above 0: a key's first `latent` dimensions are its value

    bool adjusts_scores() const { return softcap > 0 || slopes; }
    int value_dim() const { return latent > 0 ? latent : head_dim; }  // dimensions of a head's output
    int padded_value_dim() const { return round_up(value_dim(), 32); }
};

// Attention is split over the KV sequence (split-K) into chunks of 256 positions at fixed boundaries. A part
// is the partial result (unnormalized output, max, sum) of one head of one token over one or more chunks. The
// parts of a token are merged in ascending order of position. The result therefore depends neither on the
// threads that computed the parts nor on the other tokens that read the same chunks.
constexpr int kChunk = 256;

struct AttentionJob {
    const AttentionShape* shape;
    const KvCache* cache;
    const Batch* batch;
    int layer;
    const float* queries;  // head h of token t starts at queries + t * query_stride + h * head_dim
    int query_stride;
    float* out;  // has the layout of `queries`, with out_stride and heads of value_dim()
    int out_stride;
    float* parts;  // partial results; part_floats in attention.h gives the size of each
};

struct Kernels {
    // "generic"; "avx2", "avx_vnni", "avx512", "avx512_bf16", "amx"; "neon", "i8mm", "neon_bf16"
    const char* name;
    bool has_bf16;            // whether matmuls support BF16 numerics
    bool has_int8_attention;  // whether attention over an INT8 KV cache uses fast integer arithmetic
    bool prefers_int8_cache;  // whether decode attention over an INT8 KV cache is faster than over BF16
    bool interleaves_rows;    // whether `pack` interleaves rows, so that a part of them can't be read alone

    // `pack` converts rows of activations to the packed form that `matmul` reads. `x` holds `rows` rows
    // of floats that are `stride` floats apart; the call converts rows [begin, end). `input` has
    // `packed_bytes(rows, columns)` bytes and is 64-byte aligned.
    //
    // `matmul` computes units [begin, end) of the output. A unit is one panel of 16 output channels, or
    // a (gate, up) pair of panels if the epilogue is gated. `scratch` belongs to the calling thread, has
    // `scratch_bytes(columns)` bytes and is 64-byte aligned.
    size_t (*packed_bytes[kNumerics])(int rows, int columns);
    void (*pack[kNumerics])(const float* x, int stride, int columns, int rows, int begin, int end,
                            uint8_t* input);
    void (*matmul[kNumerics])(const MatmulJob& job, int begin, int end, uint8_t* scratch);
    size_t (*scratch_bytes)(int columns);
    // Requantizes one panel of `from` to layout I8. `from` has any other layout. `values` is
    // scratch memory for one panel of floats, padded to whole tiles. The pointer is null if this
    // instruction set has no INT8_PER_CHANNEL matmul.
    void (*requantize_panel)(const Matrix& from, int panel, float* values, uint8_t* out);

    // Dequantizes row `index` of the embedding table to out[0:columns].
    void (*embed)(const Matrix& table, int index, float* out);

    void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int size,
                       float* out);
    // Applies RoPE in place to the first `dim` dimensions of each of `heads` consecutive heads.
    // Dimension i is rotated together with dimension i + dim / 2.
    void (*rope)(float* x, int heads, int head_dim, int dim, const float* cosines, const float* sines);
    // Writes the keys and values of one token (kv_heads * head_dim floats each) to cache slot `slot`, which
    // is block * block_size + offset. If the cache stores no values, `values` is ignored.
    void (*write_kv)(const KvCache& cache, int layer, int64_t slot, const float* keys, const float* values);

    // Computes attention for one item of the batch's attention schedule (attention.h) and one kv
    // head. `index` is the index of the item, `head` that of the kv head.
    void (*attend)(const AttentionJob& job, int index, int head, uint8_t* scratch);
    size_t (*attend_scratch_bytes)(const AttentionShape& shape);
    // Merges the partial results of one token into `out`. Batch::merges[index] names the token and
    // its partial results. All instruction sets give bit-identical results.
    void (*merge)(const AttentionJob& job, int index);

    // The kernels of layers that keep a state (recurrent.h). `convolve` computes channels [begin, end) of the
    // convolution for the tokens of one sequence. `scan` computes one head for these tokens; `scratch` has
    // 2 * state_size floats. gate_values: x[i] *= silu(gate[i]).
    void (*convolve)(const RecurrentJob& job, const RecurrentRow& row, int begin, int end);
    void (*scan[3])(const RecurrentJob& job, const RecurrentRow& row, int head, float* scratch);
    void (*gate_values)(float* x, const float* gate, int size);

    // Computes panels [begin, end) of the output. `pack_hidden` quantizes h of a row to 8 bits, in groups of at
    // most kGroup ranks of the same part. `parts` has one panel of each part of B. Group g starts at
    // out + g * kHiddenFloats.
    void (*expand)(const ExpandJob& job, int begin, int end);
    void (*pack_hidden)(const RankPanel* parts, int num_parts, const float* hidden, float* out);

    // x[i] = cap * tanh(x[i] / cap)
    void (*softcap)(float* x, int size, float cap);

    // The functions below are reductions over one row of logits, used by sampling.
    int (*argmax)(const float* x, int size);  // index of the first maximum; NaN is never the maximum
    float (*max)(const float* x, int size);
    // Sum of exp((x[i] - max) * scale), accumulated in double.
    double (*sum_exp)(const float* x, int size, float max, float scale);
    bool (*all_finite)(const float* x, int size);
};

// The kernel tables that this CPU can run, fastest last.
struct KernelSet {
    const Kernels* tables[6];
    int count;
};
const KernelSet& kernel_set();

}  // namespace engine

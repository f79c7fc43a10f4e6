// The kernels of one instruction set, as a table. A better set starts from the table of the one below
// it and replaces what it does better; `dispatch.cpp` fills one table for each set that the CPU has.
//
// Numerics. A product is computed in one of four ways, and which one may depend on the weights' layout
// and on whether a token is a prompt's; on how many tokens share the step only for the last of them:
//   F32   float activations, weights decoded to float, float sums
//   INT8  activations rounded to 8 bits in groups of 32; whole-number dot products of a group are exact,
//         and are scaled and added up in float, group after group, in ascending order
//   BF16  activations and decoded weights rounded to bfloat16, float sums
//   INT8_PER_CHANNEL  weights of layout I8, activations turned like them (turned.h) and rounded to 8 bits with one
//         scale for each row; the dot product of whole rows is exact
// A row's result must be the same to the last bit whatever `rows` is and whichever rows are beside it.
#pragma once
#include "base/layout.h"
#include "executor/batch.h"

namespace engine {

enum class Numerics : uint8_t { F32, INT8, BF16, INT8_PER_CHANNEL };
constexpr int kNumerics = 4;

enum class Activation : uint8_t { None, Silu, Gelu, GeluTanh };

// What happens to a product before it is stored.
struct Epilogue {
    float* out;         // row r of the product goes to out + r * stride
    int stride;         // in floats
    const float* bias;  // one per row of the matrix, padded like it to whole panels; or null
    Activation activation;
    bool gated;     // panels come in pairs (gate, up): out = activation(gate) * up, 16 values per pair
    bool residual;  // add to what `out` holds
};

struct MatmulJob {
    const Matrix* weights;
    const uint8_t* input;  // packed by the same table's `pack` of the same numerics
    int rows;              // tokens
    Epilogue epilogue;
};

enum class KvType : uint8_t { F32, BF16, INT8 };

// The paged cache. Tokens lie in tiles of 16. For each layer and block: the keys of all kv heads, then
// the values; for each kv head block_size / 16 tiles. `dim` is the head's size rounded up to 32, the rest
// zero. A tile of keys has the tokens as lanes, one of values has the dimensions as lanes:
//   F32   keys [dim][16], values [16][dim]
//   BF16  keys [dim / 2][16][2], values [8 pairs of tokens][dim][2]
//   INT8  keys [dim / 4][16][4] then 16 float scales; values [4 fours of tokens][dim][4] then 16 float scales
struct KvCache {
    KvType type;
    int layers, kv_heads, head_dim, block_size;
    int64_t blocks;
    uint8_t* data;

    int dim() const { return round_up(head_dim, 32); }
    size_t tile_bytes() const {  // of keys or of values: the same
        size_t values = size_t(dim()) * 16;
        return type == KvType::F32 ? values * 4 : type == KvType::BF16 ? values * 2 : values + 64;
    }
    size_t part_bytes() const { return tile_bytes() * size_t(block_size / 16) * size_t(kv_heads); }
    size_t block_bytes() const { return 2 * part_bytes(); }
    size_t bytes() const { return block_bytes() * size_t(blocks) * size_t(layers); }
    uint8_t* key_tile(int layer, int64_t block, int head, int tile) const {
        size_t where = (size_t(layer) * size_t(blocks) + size_t(block)) * block_bytes();
        return data + where + (size_t(head) * size_t(block_size / 16) + size_t(tile)) * tile_bytes();
    }
    uint8_t* value_tile(int layer, int64_t block, int head, int tile) const {
        return key_tile(layer, block, head, tile) + part_bytes();
    }
};

struct AttentionShape {
    int heads, kv_heads, head_dim;
    float scale;
    int window;  // a token sees this many, itself included; 0: all
};

// Attention is computed chunk by chunk: 256 consecutive positions of a sequence, at fixed places. A part
// is what one token's one head got from one chunk. Parts are merged in ascending order, so it does not
// matter which thread or which step computed them, nor which tokens looked at a chunk together.
constexpr int kChunk = 256;

struct AttentionJob {
    const AttentionShape* shape;
    const KvCache* cache;
    const Batch* batch;
    int layer;
    const float* queries;  // token t, head h at queries + t * query_stride + h * head_dim
    int query_stride;
    float* out;  // the same for `out`
    int out_stride;
    float* parts;  // see attention.h
};

struct Kernels {
    const char* name;         // "generic", "avx2", "avx512", "amx", "neon"
    bool has_bf16;            // BF16 numerics
    bool has_int8_attention;  // over an INT8 cache, in whole numbers: faster than over the others

    // Matrices. `pack` brings rows [begin, end) of `rows` floats into the form its `matmul` reads; `input`
    // has room for `packed_bytes(rows, columns)`, on a 64-byte boundary. `matmul` computes units
    // [begin, end): a unit is one panel, or a pair when the epilogue is gated. `scratch` is private to the
    // thread, `scratch_bytes(columns)` large, on a 64-byte boundary.
    size_t (*packed_bytes[kNumerics])(int rows, int columns);
    void (*pack[kNumerics])(const float* x, int stride, int columns, int rows, int begin, int end,
                            uint8_t* input);
    void (*matmul[kNumerics])(const MatmulJob& job, int begin, int end, uint8_t* scratch);
    size_t (*scratch_bytes)(int columns);
    // Panel `panel` of any other layout as one of layout I8; `values` has room for a panel of floats, padded
    // to whole tiles. Null where there is no INT8_PER_CHANNEL.
    void (*requantize_panel)(const Matrix& from, int panel, float* values, uint8_t* out);

    // out[columns] = row `index` of the matrix as float.
    void (*embed)(const Matrix& table, int index, float* out);

    void (*rms_norm)(const float* x, const float* weight, float eps, int size, float* out);
    void (*layer_norm)(const float* x, const float* weight, const float* bias, float eps, int size,
                       float* out);
    // x[0:dim] of each of `heads` consecutive heads is turned; value i pairs with i + dim / 2.
    void (*rope)(float* x, int heads, int head_dim, int dim, const float* cosines, const float* sines);
    // One token's keys and values (kv_heads * head_dim floats each) go to `slot`, which is
    // block * block_size + offset.
    void (*write_kv)(const KvCache& cache, int layer, int64_t slot, const float* keys, const float* values);

    // Attention of work item `index` of the batch's schedule (attention.h), for kv head `head`.
    void (*attend)(const AttentionJob& job, int index, int head, uint8_t* scratch);
    size_t (*attend_scratch_bytes)(const AttentionShape& shape);
    // Merges the parts of Batch::merges[index] and writes to `out`: the same bits in every set.
    void (*merge)(const AttentionJob& job, int index);

    // Sampling, over one row of logits.
    int (*argmax)(const float* x, int size);  // the first of the largest; NaN is never largest
    float (*max)(const float* x, int size);
    // sum of exp((x[i] - max) * scale), in double
    double (*sum_exp)(const float* x, int size, float max, float scale);
    bool (*all_finite)(const float* x, int size);
};

// The tables, best last; those that this CPU lacks are not there.
struct KernelSet {
    const Kernels* tables[4];
    int count;
};
const KernelSet& kernel_set();

}  // namespace engine

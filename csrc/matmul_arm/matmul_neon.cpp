// INT8 GEMM in NEON. Up to twelve rows of activations share each load of the weights.
//
// The integer dot product of a group is exact. In layouts with two scales per group, so is that of
// each half. It is multiplied by the activation scale, which gives `dot` below. Then the following
// terms are added to the float accumulator, in this order. Each addition rounds once:
//     activation sum * minimum,  dot * scale
// Bytes of layout Q8M are read as byte - 128. To make up for that, 128 * scale is added to their
// minimum.
//
// Operands are loaded from memory again rather than copied or broadcast between registers. Copies
// and broadcasts would occupy the multiply pipelines, and loads do not.
#include "base/dispatch.h"
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/unit_blocks.h"
#include "matmul_arm/packed_input_neon.h"
#include "matmul_arm/weights_neon.h"

namespace engine {
namespace {

constexpr int kVectors = kPanelRows / 4;

alignas(16) const int32_t kZeroDots[4] = {kRoundShiftBits, kRoundShiftBits, kRoundShiftBits, kRoundShiftBits};

// Loads a vector from memory. With an intrinsic, the compiler would copy the register that already
// holds the value.
template <class T>
ENGINE_INLINE float32x4_t reload(const T (&from)[4]) {
    float32x4_t loaded;
    __asm__ volatile("ldr %q0, %1" : "=w"(loaded) : "m"(from));
    return loaded;
}

// In each lane, adds to `sum` the dot product of four weights and word `word` of x.
template <int word>
ENGINE_INLINE void add_dots(float32x4_t& sum, int8x16_t weights, int8x16_t x) {
    __asm__ volatile("sdot %0.4s, %1.16b, %2.4b[%3]" : "+w"(sum) : "w"(weights), "w"(x), "i"(word));
}

// Does the same for four words and four rows. It is one asm statement, because the compiler would
// insert register copies between separate statements.
#define ADD_WORD(weights, word)                  \
    "sdot %0.4s, %" weights ".16b, %8.4b[" word  \
    "]\n"                                        \
    "sdot %1.4s, %" weights ".16b, %9.4b[" word  \
    "]\n"                                        \
    "sdot %2.4s, %" weights ".16b, %10.4b[" word \
    "]\n"                                        \
    "sdot %3.4s, %" weights ".16b, %11.4b[" word "]\n"
ENGINE_INLINE void add_dots_of_four(float32x4_t (&sums)[4], const int8x16_t* weights,
                                    const int8x16_t (&x)[4]) {
    __asm__ volatile(ADD_WORD("4", "0") ADD_WORD("5", "1") ADD_WORD("6", "2") ADD_WORD("7", "3")
                     : "+w"(sums[0]), "+w"(sums[1]), "+w"(sums[2]), "+w"(sums[3])
                     : "w"(weights[0]), "w"(weights[1]), "w"(weights[2]), "w"(weights[3]), "w"(x[0]),
                       "w"(x[1]), "w"(x[2]), "w"(x[3]));
}
#undef ADD_WORD

// sum += a * b
ENGINE_INLINE void fma(float32x4_t& sum, float32x4_t a, float32x4_t b) {
    __asm__ volatile("fmla %0.4s, %1.4s, %2.4s" : "+w"(sum) : "w"(a), "w"(b));
}
template <int lane>
ENGINE_INLINE void fma_lane(float32x4_t& sum, float32x4_t a, float32x4_t b) {
    __asm__ volatile("fmla %0.4s, %1.4s, %2.s[%3]" : "+w"(sum) : "w"(a), "w"(b), "i"(lane));
}

// Accumulates one group, four sums at a time. Sum c belongs to row c % rows and vector c / rows.
// First come all dot products of the four sums, then all their scaling, in exactly this order.
// Alternating between dot products and scaling would cost issue slots.
template <Layout layout, int rows, int wide>
ENGINE_INLINE void add_group(const Weights<layout>* weights, const InputGroup* x,
                             float32x4_t (&sums)[wide * rows]) {
    constexpr int kScales = scales_per_group(layout), kCount = 8 / kScales, kSums = wide * rows;
    unroll<(kSums + 3) / 4 * kScales>([&](auto index) ALWAYS {
        constexpr int kScale = index % kScales, kFirst = index / kScales * 4;
        constexpr int kNow = kSums - kFirst < 4 ? kSums - kFirst : 4;
        float32x4_t dots[kNow], products[kNow];
        unroll<kNow>([&](auto c) ALWAYS { dots[c] = reload(kZeroDots); });
        unroll<kCount / 4>([&](auto part) ALWAYS {
            constexpr int kHalf = kScale + part;
            int8x16_t values[kNow];
            unroll<kNow>([&](auto c)
                             ALWAYS { values[c] = vld1q_s8(x[(kFirst + c) % rows].values + kHalf * 16); });
            if constexpr (kNow == 4 && wide == 1)
                add_dots_of_four(dots, weights->values + kHalf * 4, values);
            else
                unroll<4 * kNow>([&](auto i) ALWAYS {
                    const Weights<layout>& from = weights[(kFirst + i % kNow) / rows];
                    add_dots<i / kNow>(dots[i % kNow], from.values[kHalf * 4 + i / kNow], values[i % kNow]);
                });
        });
        unroll<kNow>([&](auto c) ALWAYS {
            constexpr int kSum = kFirst + c, kInputSum = kScales == 2 ? 2 + kScale : 1;
            products[c] = reload(x[kSum % rows].shift);
            float32x4_t factors = vld1q_f32(&x[kSum % rows].scale);
            if (has_minima(layout))
                fma_lane<kInputSum>(sums[kSum], weights[kSum / rows].minima[kScale], factors);
            fma_lane<0>(products[c], dots[c], factors);
        });
        unroll<kNow>([&](auto c) ALWAYS {
            fma(sums[kFirst + c], products[c], weights[(kFirst + c) / rows].scales[kScale]);
        });
    });
}

// Prefetches the weights that are needed next. It is used with at most two rows, where the hardware
// prefetcher is too slow.
template <Layout layout>
ENGINE_INLINE void prefetch_weights(const uint8_t* panel, int g) {
    constexpr int kAhead = is_4_bit(layout) ? 2048 : 8192;
    const int stream =
        layout == Layout::Q8 ? 544 : int(group_bytes(layout));  // Q8: including the group's scales
    for (int i = 0; i < stream; i += 64) __builtin_prefetch(panel + size_t(g) * size_t(stream) + kAhead + i);
}

// Multiplies `rows` rows of activations by 4 * `vectors` channels of a panel, starting at channel 4
// * `first`. The sums of row r go to out + 32 r.
template <Layout layout, int rows, int vectors>
ENGINE_INLINE void multiply_strip(const uint8_t* panel, int first, int groups, const InputGroup* x,
                                  float* out) {
    constexpr int kWide = rows <= 2 ? 4 / rows : 1, kSums = kWide * rows;
    float32x4_t sums[vectors / kWide][kSums];
    unroll<rows * vectors>([&](auto i) ALWAYS { sums[i / kSums][i % kSums] = vdupq_n_f32(0); });
    for (int g = 0; g < groups; g++, x += rows) {
        const uint8_t* group = panel + size_t(g) * group_bytes(layout) + 16 * first;
        const uint16_t* scales = scales_of<layout>(panel, groups, g) + 4 * first;
        if constexpr (rows <= 2) prefetch_weights<layout>(panel, g);
        unroll<vectors / kWide>([&](auto index) ALWAYS {
            Weights<layout> weights[kWide];
            unroll<kWide>([&](auto v) ALWAYS {
                constexpr int kPlace = index * kWide + v;
                weights[v].load(group + 16 * kPlace, scales + 4 * kPlace);
            });
            add_group<layout, rows, kWide>(weights, x, sums[index]);
        });
    }
    unroll<rows * vectors>([&](auto i) ALWAYS {
        vst1q_f32(out + i % rows * 2 * kPanelRows + i / rows * 4, sums[i / kSums][i % kSums]);
    });
}

// Number of vectors (of four channels) whose accumulators fit into registers beside the operands,
// for `rows` rows.
constexpr int vectors_for(int rows) {
    return rows <= 3 ? 4 : rows <= 6 ? 2 : 1;
}

using Multiply = void (*)(const uint8_t* panel, int groups, const InputGroup* x, float* out);

template <Layout layout, int rows>
void multiply_panel(const uint8_t* panel, int groups, const InputGroup* x, float* out) {
    constexpr int vectors = vectors_for(rows);
    for (int first = 0; first < kVectors; first += vectors)
        multiply_strip<layout, rows, vectors>(panel, first, groups, x, out + 4 * first);
}

template <Layout layout, int... i>
Multiply multiply_for(int rows, std::integer_sequence<int, i...>) {
    static constexpr Multiply all[] = {multiply_panel<layout, i + 1>...};
    return all[rows - 1];
}

void matmul_int8(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const int groups = job.weights->groups();
    auto input = reinterpret_cast<const InputGroup*>(job.input);
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16)
            multiply_units<layout, kBlockRows>(job, begin, end, job.rows, block_rows(job.rows), scratch,
                                               [&](const uint8_t* panel, int row, int rows, float* sums) {
                                                   auto all = std::make_integer_sequence<int, kBlockRows>();
                                                   multiply_for<layout>(rows, all)(
                                                       panel, groups, input + size_t(row) * size_t(groups),
                                                       sums);
                                               });
    });
}

// The place of a row's first group. The next group of the row is `step` groups further.
struct PackedRow {
    InputGroup* first;
    int step;

    PackedRow(uint8_t* input, int rows, int groups, int row) {
        const int block = block_rows(rows), start = row / block * block;
        first = reinterpret_cast<InputGroup*>(input) + size_t(start) * size_t(groups) + row - start;
        step = rows - start < block ? rows - start : block;
    }
};

void pack_int8(const float* x, int stride, int columns, int rows, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++) {
        const PackedRow out(input, rows, div_up(columns, kGroup), row);
        for_groups(x + size_t(row) * size_t(stride), columns,
                   [&](const float* group, int g) ALWAYS { pack_group(group, out.first[g * out.step]); });
    }
}

void pack_int8_outliers(const float* x, int stride, int columns, int rows, int begin, int end,
                        uint8_t* input) {
    const int groups = div_up(columns, kGroup);
    Outlier* lists = outliers_after(input, packed_bytes_int8(rows, columns));
    for (int row = begin; row < end; row++) {
        const PackedRow out(input, rows, groups, row);
        without_outliers(x + size_t(row) * size_t(stride), columns, lists + outliers_begin(row, groups),
                         [&](const float* group, int g)
                             ALWAYS { pack_group(group, out.first[g * out.step]); });
    }
}

size_t packed_bytes_int8_outliers(int rows, int columns) {
    return bytes_with_outliers(packed_bytes_int8(rows, columns), rows, columns);
}

void matmul_int8_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    matmul_int8(with_outliers(job, packed_bytes_int8(job.rows, job.weights->columns)), begin, end, scratch);
}

}  // namespace

void fill_matmul_neon(Kernels& table) {
    table.interleaves_rows = true;
    constexpr int kInt8 = int(Numerics::INT8), kOutliers = int(Numerics::INT8_OUTLIERS);
    table.packed_bytes[kInt8] = packed_bytes_int8;
    table.pack[kInt8] = pack_int8;
    table.matmul[kInt8] = matmul_int8;
    table.packed_bytes[kOutliers] = packed_bytes_int8_outliers;
    table.pack[kOutliers] = pack_int8_outliers;
    table.matmul[kOutliers] = matmul_int8_outliers;
}

}  // namespace engine

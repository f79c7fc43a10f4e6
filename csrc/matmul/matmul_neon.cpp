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
#include "matmul/dequantize.h"
#include "matmul/epilogue.h"
#include "matmul/packed_input_neon.h"

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

// Loads four values of each of four channels. The 32 values that four channels have in a group are
// eight such vectors.
template <Layout layout, int index>
ENGINE_INLINE int8x16_t load_values(const uint8_t* group) {
    if (!is_4_bit(layout)) {
        uint8x16_t bytes = vld1q_u8(group + index * 64);
        return vreinterpretq_s8_u8(veorq_u8(bytes, vdupq_n_u8(128)));
    }
    uint8x16_t bytes = vld1q_u8(group + index % 4 * 64);
    return vreinterpretq_s8_u8(index < 4 ? vandq_u8(bytes, vdupq_n_u8(15)) : vshrq_n_u8(bytes, 4));
}

// The weights of four channels in one group.
template <Layout layout>
struct Weights {
    int8x16_t values[8];
    float32x4_t scales[scales_per_group(layout)], minima[scales_per_group(layout)];

    ALWAYS void load(const uint8_t* group, const uint16_t* stored) {
        unroll<8>([&](auto i) ALWAYS { values[i] = load_values<layout, i>(group); });
        unroll<scales_per_group(layout)>([&](auto i) ALWAYS {
            scales[i] = load_halves(stored + i * kPanelRows);
            if (has_minima(layout))
                minima[i] = load_halves(stored + (scales_per_group(layout) + i) * kPanelRows);
            if (layout == Layout::Q8M) minima[i] = vfmaq_n_f32(minima[i], scales[i], 128.0f);
        });
    }
};

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

template <Layout layout>
void multiply_units(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const Matrix& weights = *job.weights;
    const int groups = weights.groups(), panels = job.epilogue.gated ? 2 : 1, block = block_rows(job.rows);
    auto input = reinterpret_cast<const InputGroup*>(job.input);
    OutlierUnit<layout> outliers(job, scratch);
    for (int unit = begin; unit < end; unit++) {
        outliers.start(unit);
        for (int row = 0; row < job.rows; row += block) {
            int rows = job.rows - row < block ? job.rows - row : block;
            Multiply multiply = multiply_for<layout>(rows, std::make_integer_sequence<int, kBlockRows>());
            float sums[kBlockRows][2 * kPanelRows];
            prefetch_outputs(job, unit, row, rows);
            for (int i = 0; i < panels; i++)
                multiply(weights.panel(unit * panels + i), groups, input + size_t(row) * size_t(groups),
                         sums[0] + i * kPanelRows);
            for (int r = 0; r < rows; r++) {
                outliers.add(row + r, sums[r]);
                apply_epilogue(job, unit, row + r, sums[r]);
            }
        }
    }
}

void matmul_int8(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16) multiply_units<layout>(job, begin, end, scratch);
    });
}

size_t packed_bytes_int8_outliers(int rows, int columns) {
    return bytes_with_outliers(packed_bytes_int8(rows, columns), rows, columns);
}

void matmul_int8_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    matmul_int8(with_outliers(job, packed_bytes_int8(job.rows, job.weights->columns)), begin, end, scratch);
}

}  // namespace

void fill_matmul_neon(Kernels& table) {
    constexpr int kInt8 = int(Numerics::INT8), kOutliers = int(Numerics::INT8_OUTLIERS);
    table.packed_bytes[kInt8] = packed_bytes_int8;
    table.pack[kInt8] = pack_int8;
    table.matmul[kInt8] = matmul_int8;
    table.packed_bytes[kOutliers] = packed_bytes_int8_outliers;
    table.pack[kOutliers] = pack_int8_outliers;
    table.matmul[kOutliers] = matmul_int8_outliers;
}

}  // namespace engine

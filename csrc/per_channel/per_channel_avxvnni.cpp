// Per-channel int8 GEMM with vpdpbusd on 256 bits. Up to six rows of activations share each load of the weights.
// Sums over all of K are exact integers, so the results are those of the other per-channel kernels.
//
// vpdpbusd multiplies unsigned by signed bytes. Weights are read as byte + 128, and each sum starts at -128 *
// the sum of the row's activations. Sums wrap around in between, which the end makes good.
//
// A packed row has its rotated int8 values (hadamard.h), then its dequantization scale and the start of its sums.
#include <cmath>

#include "base/dispatch.h"
#include "matmul/unit_blocks.h"
#include "matmul/vnni256.h"
#include "per_channel/hadamard.h"

namespace engine {
namespace {

constexpr int kMaxRows = 6;
constexpr int kVectors = kHadamardSize / 8;

struct RowEnd {
    float scale;
    int32_t start;
};

ENGINE_INLINE size_t values_bytes(int columns) {
    return size_t(round_up(columns, kTileColumns));
}

ENGINE_INLINE size_t row_bytes(int columns) {
    return values_bytes(columns) + 64;
}

size_t packed_bytes(int rows, int columns) {
    return size_t(rows) * row_bytes(columns);
}

// One stage of the Hadamard transform on 8 lanes: v[i] and v[i ^ apart] become their sum and difference.
// `swapped` holds v[i ^ apart] in lane i. `signs` is -1 in the lanes whose bit `apart` is set.
ENGINE_INLINE __m256 butterfly(__m256 v, __m256 swapped, __m256 signs) {
    return _mm256_fmadd_ps(v, signs, swapped);
}

// Rotates 64 values. The stages are in the order of the other per-channel kernels, so their rounding is, too.
ENGINE_INLINE void rotate_values(const float* from, __m256 (&v)[kVectors]) {
    const __m256 ones = _mm256_setr_ps(1, -1, 1, -1, 1, -1, 1, -1);
    const __m256 twos = _mm256_setr_ps(1, 1, -1, -1, 1, 1, -1, -1);
    const __m256 fours = _mm256_setr_ps(1, 1, 1, 1, -1, -1, -1, -1);
    for (int i = 0; i < kVectors; i++) {
        v[i] = _mm256_loadu_ps(from + 8 * i);
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0b10110001), ones);
        v[i] = butterfly(v[i], _mm256_permute_ps(v[i], 0b01001110), twos);
        v[i] = butterfly(v[i], _mm256_permute2f128_ps(v[i], v[i], 1), fours);
    }
    for (int apart = 1; apart < kVectors; apart *= 2)
        for (int k = 0; k < kVectors / 2; k++) {
            const int i = k / apart * 2 * apart + k % apart;
            const __m256 one = v[i], other = v[i + apart];
            v[i] = _mm256_add_ps(one, other);
            v[i + apart] = _mm256_sub_ps(one, other);
        }
}

// Calls take(v) for each 64 rotated values of a row. The last of them are padded with zeros.
template <class Take>
ENGINE_INLINE void rotate_row(const float* x, int columns, Take take) {
    for (int k = 0; k < columns; k += kHadamardSize) {
        float padded[kHadamardSize] = {};
        const int left = columns - k;
        if (left < kHadamardSize) memcpy(padded, x + k, size_t(left) * sizeof(float));
        __m256 v[kVectors];
        rotate_values(left < kHadamardSize ? padded : x + k, v);
        take(v);
    }
}

// Packs one row. The row is rotated twice, first to find its scale, then to quantize it. If the row contains
// NaN or infinity, its scale is not finite, and neither is any result of the row.
void pack_row(const float* x, int columns, uint8_t* out) {
    __m256i sizes = _mm256_setzero_si256();  // bit patterns, where NaN is the largest
    rotate_row(x, columns, [&](const __m256(&v)[kVectors]) {
        for (int i = 0; i < kVectors; i++)
            sizes = _mm256_max_epi32(
                sizes, _mm256_and_si256(_mm256_castps_si256(v[i]), _mm256_set1_epi32(0x7fffffff)));
    });
    int32_t lanes[8], largest = 0, sum = 0;
    memcpy(lanes, &sizes, sizeof lanes);
    for (int32_t each : lanes) largest = each > largest ? each : largest;
    const float absmax = bits_to_float(uint32_t(largest));
    const bool is_normal = absmax > 1e-30f && std::isfinite(absmax);
    const __m256 inverse = _mm256_set1_ps(is_normal ? 127 / absmax : 0.0f);
    int8_t* values = reinterpret_cast<int8_t*>(out);
    rotate_row(x, columns, [&](const __m256(&v)[kVectors]) {
        int32_t integers[kHadamardSize];
        for (int i = 0; i < kVectors; i++) {
            const __m256i eight = _mm256_cvtps_epi32(_mm256_mul_ps(v[i], inverse));
            memcpy(integers + 8 * i, &eight, sizeof eight);
        }
        for (int i = 0; i < kHadamardSize; i++) {
            values[i] = int8_t(integers[i]);
            sum += values[i];
        }
        values += kHadamardSize;
    });
    const RowEnd end{is_normal || !std::isfinite(absmax) ? absmax / 127 : 0.0f, -128 * sum};
    memcpy(values, &end, sizeof end);
}

void pack(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++)
        pack_row(x + size_t(row) * size_t(stride), columns, input + size_t(row) * row_bytes(columns));
}

// Multiplies `rows` rows by one panel. The results of row r go to out + 32 r.
template <int rows>
void multiply_panel(const uint8_t* panel, int columns, const uint8_t* input, float* out) {
    const size_t stride = row_bytes(columns), size = values_bytes(columns);
    const __m256i flip = _mm256_set1_epi8(-128);
    RowEnd ends[rows];
    __m256i sums[rows][2];
    unroll<rows>([&](auto r) ALWAYS {
        memcpy(&ends[r], input + r * stride + size, sizeof(RowEnd));
        sums[r][0] = sums[r][1] = _mm256_set1_epi32(ends[r].start);
    });
    for (size_t k = 0; k < size; k += 4, panel += 4 * kPanelRows) {
        const auto* four = reinterpret_cast<const __m256i*>(panel);
        const __m256i low = _mm256_xor_si256(_mm256_loadu_si256(four), flip);
        const __m256i high = _mm256_xor_si256(_mm256_loadu_si256(four + 1), flip);
        unroll<rows>([&](auto r) ALWAYS {
            int32_t word;
            memcpy(&word, input + r * stride + k, sizeof word);
            const __m256i x = _mm256_set1_epi32(word);
            sums[r][0] = add_dots(sums[r][0], low, x);
            sums[r][1] = add_dots(sums[r][1], high, x);
        });
    }
    const auto* scales = reinterpret_cast<const float*>(panel);
    unroll<2 * rows>([&](auto i) ALWAYS {
        constexpr int r = i / 2, part = i % 2;
        const __m256 scaled = _mm256_mul_ps(_mm256_cvtepi32_ps(sums[r][part]), _mm256_set1_ps(ends[r].scale));
        _mm256_storeu_ps(out + r * 2 * kPanelRows + 8 * part,
                         _mm256_mul_ps(scaled, _mm256_loadu_ps(scales + 8 * part)));
    });
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    using Multiply = void (*)(const uint8_t*, int, const uint8_t*, float*);
    constexpr Multiply all[kMaxRows] = {multiply_panel<1>, multiply_panel<2>, multiply_panel<3>,
                                        multiply_panel<4>, multiply_panel<5>, multiply_panel<6>};
    const int columns = job.weights->columns, block = div_up(job.rows, div_up(job.rows, kMaxRows));
    multiply_units<Layout::I8, kMaxRows>(
        job, begin, end, job.rows, block, scratch, [&](const uint8_t* panel, int row, int rows, float* sums) {
            all[rows - 1](panel, columns, job.input + size_t(row) * row_bytes(columns), sums);
        });
}

}  // namespace

void fill_per_channel_avxvnni(Kernels& table) {
    constexpr int kRows = int(Numerics::INT8_PER_CHANNEL);
    table.packed_bytes[kRows] = packed_bytes;
    table.pack[kRows] = pack;
    table.matmul[kRows] = matmul;
}

}  // namespace engine

// Operands and loop order of the AVX-512 GEMM. Rows of activations are processed in passes. The activations of a
// pass stay in the L2 cache while one panel after the other is multiplied by them. Within a pass,
// rows are processed in blocks whose accumulators fit into registers.
#pragma once
#include "base/unroll.h"
#include "base/with_layout.h"
#include "matmul/epilogue_avx512.h"
#include "vector/vector_math_avx512.h"

namespace engine {
namespace {

constexpr int kBlockRows = 12;  // max rows per block; its accumulators leave some registers free

// Inlines a function and turns off UBSan in it. With UBSan's checks on every address, compiling
// these unrolled functions takes many minutes.
#define ENGINE_UNROLLED __attribute__((always_inline, no_sanitize("undefined")))

// R rows of packed activations that are `stride` bytes apart. Each base pointer serves three rows,
// through scaled-index addressing with 0, 1 or 2 strides. One pointer per row would not fit into
// the registers.
template <int R>
struct InputRows {
    const uint8_t* bases[(R + 2) / 3];
    size_t stride;

    ENGINE_UNROLLED InputRows(const uint8_t* input, size_t stride_) : stride(stride_) {
        unroll<(R + 2) / 3>([&](auto i) ENGINE_UNROLLED { bases[i] = input + 3 * i * stride; });
    }
    ENGINE_UNROLLED void advance(int bytes) {
        unroll<(R + 2) / 3>([&](auto i) ENGINE_UNROLLED { bases[i] += bytes; });
    }
    template <class T>
    ENGINE_UNROLLED const T& at(int row) const {
        return *reinterpret_cast<const T*>(bases[row / 3] + size_t(row % 3) * stride);
    }
};

// 32 activations of a row, quantized to int8.
struct InputGroup {
    int32_t values[8];  // each holds four int8 values
    float scale;        // its two low bits are zero, so that `shift` is exact
    float shift;        // -kRoundShift * scale
    float sum;          // scale * sum of the 32 values
    float first_sum;    // scale * sum of the first 16 values
};

// Returns values [16 * Half + 4 * quad, 16 * Half + 4 * quad + 4) of a group, for 16 channels, as
// unsigned bytes.
template <Layout L, int Half>
ENGINE_INLINE __m512i four_values(const uint8_t* group, int quad) {
    if constexpr (!is_4_bit(L)) return _mm512_load_si512(group + 64 * (4 * Half + quad));
    __m512i both = _mm512_load_si512(group + 64 * quad);
    return _mm512_and_si512(Half ? _mm512_srli_epi16(both, 4) : both, _mm512_set1_epi8(15));
}

struct Scales {
    __m512 scale, minimum;
};

// Returns the scales and minima of 16 channels in group `index`. `half` selects the half of the
// group in layouts with two scales per group; otherwise it is 0.
template <Layout L>
ENGINE_INLINE Scales load_scales(const uint8_t* panel, int groups, int index, int half) {
    const uint8_t* at = panel + size_t(index) * group_bytes(L) + (is_4_bit(L) ? 256 : 512) + 32 * half;
    if constexpr (L == Layout::Q8) at = panel + size_t(groups) * group_bytes(L) + 32 * index;
    __m512 scale = load_halves(at);
    if constexpr (has_minima(L)) return {scale, load_halves(at + (scales_per_group(L) == 2 ? 64 : 32))};
    return {scale, _mm512_mul_ps(scale, _mm512_set1_ps(-128.0f))};
}

// A function that multiplies a block of rows by one panel and writes sums[row][16]. `prefetch` is
// set for the first block of rows, which reads the panel from memory rather than from the cache.
using Dot = void (*)(const uint8_t* panel, const uint8_t* input, size_t stride, int groups, bool prefetch,
                     float* sums);

struct GemmKernel {
    const Dot* dots;   // one function per block size; dots[r - 1] is for r rows
    size_t row_bytes;  // size of one row of packed activations
    // Dequantizes a panel to the form that `dots` read. Null if `dots` read panels as they are
    // stored.
    void (*dequantize)(const uint8_t* panel, int groups, float* out);
    // Adds the products of outliers to the sums of rows [first, first + size). Null if there are none.
    // `is_new` is set for the first rows that are multiplied by this unit.
    void (*add_outliers)(const MatmulJob& job, int unit, bool is_new, int first, int size, float* sums,
                         uint8_t* scratch);
};

// Applies the epilogue to rows [first, first + size). `sums` holds those of the first panel of the unit. Those of
// the second panel follow after `apart` rows, if the epilogue is gated.
ENGINE_INLINE void store_block(const MatmulJob& job, int unit, int first, int size, const float* sums,
                               int apart) {
    const Epilogue& to = job.epilogue;
    const __mmask16 lanes = output_lanes(job, unit);
    for (int row = 0; row < size; row++) {
        __m512 sum = _mm512_load_ps(sums + row * kPanelRows);
        if (to.gated) {
            __m512 up = _mm512_load_ps(sums + (apart + row) * kPanelRows);
            store_gated_row(to, unit, first + row, lanes, sum, up);
        } else {
            store_row(to, unit, first + row, lanes, sum);
        }
    }
}

static void run_unit(const MatmulJob& job, const GemmKernel& kernel, int unit, int begin_row, int end_row,
                     uint8_t* scratch) {
    const Matrix& weights = *job.weights;
    const int panels = job.epilogue.gated ? 2 : 1, groups = weights.groups();
    const uint8_t* sources[2];
    for (int i = 0; i < panels; i++) {
        sources[i] = weights.panel(unit * panels + i);
        if (!kernel.dequantize) continue;
        uint8_t* buffer = scratch + size_t(i) * panel_bytes(Layout::F32, weights.columns);
        kernel.dequantize(sources[i], groups, reinterpret_cast<float*>(buffer));
        sources[i] = buffer;
    }
    alignas(64) float sums[2 * kBlockRows * kPanelRows];
    const int blocks = div_up(end_row - begin_row, kBlockRows);
    for (int block = 0, row = begin_row; block < blocks; block++) {
        const int size = div_up(end_row - row, blocks - block);  // all blocks have nearly the same size
        const uint8_t* input = job.input + size_t(row) * kernel.row_bytes;
        prefetch_outputs(job.epilogue, unit, row, size);
        for (int i = 0; i < panels; i++)
            kernel.dots[size - 1](sources[i], input, kernel.row_bytes, groups,
                                  block == 0 && !kernel.dequantize, sums + i * kBlockRows * kPanelRows);
        if (kernel.add_outliers) kernel.add_outliers(job, unit, block == 0, row, size, sums, scratch);
        store_block(job, unit, row, size, sums, kBlockRows);
        row += size;
    }
}

// Rows of a pass. Their activations take a part of the L2 cache.
ENGINE_INLINE int pass_rows(size_t row_bytes) {
    constexpr size_t kPassBytes = 512 << 10;
    constexpr int kMinRows = 6 * kBlockRows;
    const int rows = int(kPassBytes / row_bytes) / kBlockRows * kBlockRows;
    return rows < kMinRows ? kMinRows : rows;
}

static inline void run_units(const MatmulJob& job, const GemmKernel& kernel, int begin, int end,
                             uint8_t* scratch) {
    const int pass = pass_rows(kernel.row_bytes);
    for (int row = 0; row < job.rows; row += pass) {
        int end_row = row + pass < job.rows ? row + pass : job.rows;
        for (int unit = begin; unit < end; unit++) run_unit(job, kernel, unit, row, end_row, scratch);
    }
}

ENGINE_INLINE void prefetch_lines(const uint8_t* from, int lines) {
    constexpr int kAhead = 2048;
    for (int i = 0; i < lines; i++)
        _mm_prefetch(reinterpret_cast<const char*>(from + kAhead + i * 64), _MM_HINT_T0);
}

}  // namespace
}  // namespace engine

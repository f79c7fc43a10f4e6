// Per-channel int8 GEMM with vpdpbusd on 512 bits. Up to 12 rows of activations share each load of the weights of
// two panels, and both panels share each load of an activation. Sums over all of K are exact integers, so the
// results are those of the other per-channel kernels.
//
// vpdpbusd multiplies unsigned by signed bytes. Activations are packed as byte + 128, and the sums of a channel
// start at -128 * the sum of its weights. Sums wrap around in between, which the end makes good.
//
// A packed row has its rotated values (hadamard.h), then its dequantization scale.
#include <cmath>

#include "base/dispatch.h"
#include "matmul/matmul_avx512.h"
#include "per_channel/rotation_avx512.h"

namespace engine {
namespace {

constexpr int kOffset = 128;

size_t values_bytes(int columns) {
    return size_t(round_up(columns, kTileColumns));
}

size_t row_bytes(int columns) {
    return values_bytes(columns) + 64;
}

size_t packed_bytes(int rows, int columns) {
    return size_t(rows) * row_bytes(columns);
}

// Packs one row. The row is rotated twice, first to find its scale, then to quantize it. If the row contains
// NaN or infinity, its scale is not finite, and neither is any result of the row.
void pack_row(const float* x, int columns, uint8_t* out) {
    const RowScale scale = row_scale(rotated_absmax(x, columns));
    const __m512 inverse = _mm512_set1_ps(scale.inverse);
    for (int k = 0; k < columns; k += kTileColumns) {
        __m512 v[4];
        rotate_values(x + k, columns - k, v);
        for (int i = 0; i < 4; i++, out += 16) {
            const __m512i integers = _mm512_cvtps_epi32(_mm512_mul_ps(v[i], inverse));
            const __m128i bytes = _mm512_cvtsepi32_epi8(integers);
            _mm_store_si128(reinterpret_cast<__m128i*>(out),
                            _mm_xor_si128(bytes, _mm_set1_epi8(int8_t(-kOffset))));
        }
    }
    memcpy(out, &scale.scale, sizeof scale.scale);
}

void pack(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++)
        pack_row(x + size_t(row) * size_t(stride), columns, input + size_t(row) * row_bytes(columns));
}

// Returns -128 * the sum of each channel's weights. Four chains of sums hide the latency of vpdpbusd.
__m512i sum_starts(const uint8_t* panel, size_t size) {
    constexpr int kChains = 4;
    const __m512i offsets = _mm512_set1_epi8(int8_t(-kOffset));  // 128 as an unsigned byte
    __m512i sums[kChains] = {};
    for (size_t k = 0; k < size; k += 4 * kChains, panel += 4 * kChains * kPanelRows) {
        prefetch_lines(panel, kChains);
        unroll<kChains>([&](auto i) ENGINE_UNROLLED {
            const __m512i weights = _mm512_load_si512(panel + i * 4 * kPanelRows);
            sums[i] = _mm512_dpbusd_epi32(sums[i], offsets, weights);
        });
    }
    for (int i = 1; i < kChains; i++) sums[0] = _mm512_add_epi32(sums[0], sums[i]);
    return _mm512_sub_epi32(_mm512_setzero_si512(), sums[0]);
}

// Adjacent panels of a matrix, and where the sums of their channels start. While they are multiplied, the next
// panels are prefetched into L2, a few cache lines at a time.
struct Panels {
    const uint8_t* first;
    size_t stride, size;  // bytes from one panel to the next, columns of a panel
    __m512i starts[2];
    const uint8_t* next;  // next cache line to prefetch
    int lines;            // cache lines to prefetch per kStepColumns
};

constexpr int kWords = 4;  // words of four activations per step
constexpr int kStepColumns = 4 * kWords;

// Inline assembly, because GCC 12 copies and spills the sums of the intrinsic.
ENGINE_INLINE void add_products(__m512i& sum, __m512i x, __m512i weights) {
    __asm__("vpdpbusd %2, %1, %0" : "+v"(sum) : "v"(x), "v"(weights));
}

// Multiplies R rows by P panels. The results of row r and panel p go to out + 16 * (2 r + p).
template <int R, int P>
void multiply_panels(Panels& panels, const uint8_t* input, size_t stride, float* out) {
    struct Words {
        int32_t values[kWords];  // each holds four activations
    };
    InputRows<R> rows(input, stride);
    const uint8_t* at = panels.first;
    __m512i sums[R * P];
    unroll<R * P>([&](auto i) ENGINE_UNROLLED { sums[i] = panels.starts[i % P]; });
    const uint8_t* next = panels.next;
    const int lines = panels.lines;
    for (size_t k = 0; k < panels.size; k += kStepColumns, at += kStepColumns * kPanelRows) {
        for (int i = 0; i < lines; i++, next += 64) __builtin_prefetch(next, 0, 2);
        unroll<kWords>([&](auto word) ENGINE_UNROLLED {
            __m512i weights[P];
            unroll<P>([&](auto p) ENGINE_UNROLLED {
                weights[p] = _mm512_load_si512(at + p * panels.stride + word * 4 * kPanelRows);
            });
            unroll<R>([&](auto r) ENGINE_UNROLLED {
                const __m512i x = _mm512_set1_epi32(rows.template at<Words>(r).values[word]);
                unroll<P>([&](auto p) ENGINE_UNROLLED { add_products(sums[P * r + p], x, weights[p]); });
            });
        });
        rows.advance(sizeof(Words));
    }
    panels.next = next;
    unroll<R * P>([&](auto i) ENGINE_UNROLLED {
        constexpr int r = i / P, p = i % P;
        const __m512 row_scale = _mm512_set1_ps(rows.template at<float>(r));
        const __m512 scaled = _mm512_mul_ps(_mm512_cvtepi32_ps(sums[i]), row_scale);
        const __m512 scale = _mm512_load_ps(at + p * panels.stride);
        _mm512_store_ps(out + (2 * r + p) * kPanelRows, _mm512_mul_ps(scaled, scale));
    });
}

using Multiply = void (*)(Panels& panels, const uint8_t* input, size_t stride, float* out);

template <int P, int... R>
const Multiply* multiply_functions(std::integer_sequence<int, R...>) {
    static constexpr Multiply functions[] = {multiply_panels<R + 1, P>...};
    return functions;
}

// Multiplies rows [begin, end) by one panel or two.
void multiply_rows(const MatmulJob& job, int panel, bool is_single, int begin, int end) {
    const int columns = job.weights->columns;
    const size_t stride = row_bytes(columns), size = values_bytes(columns);
    const uint8_t* first = job.weights->panel(panel);
    Panels panels{first, job.weights->stride(), size, {sum_starts(first, size)}, nullptr, 0};
    panels.next = first + 2 * panels.stride;
    panels.lines =
        begin > 0 ? 0
                  : div_up(int(2 * panels.stride / 64), div_up(end, kBlockRows) * int(size / kStepColumns));
    if (!is_single) panels.starts[1] = sum_starts(first + panels.stride, size);
    const auto sizes = std::make_integer_sequence<int, kBlockRows>{};
    const Multiply* functions = is_single ? multiply_functions<1>(sizes) : multiply_functions<2>(sizes);
    const PairOutput output = pair_output(job, panel, is_single);
    alignas(64) float sums[2 * kBlockRows * kPanelRows];
    const int blocks = div_up(end - begin, kBlockRows);
    for (int block = 0, row = begin; block < blocks; block++) {
        const int count = div_up(end - row, blocks - block);  // all blocks have nearly the same size
        prefetch_outputs(job.epilogue, job.epilogue.gated ? panel / 2 : panel, row, count);
        functions[count - 1](panels, job.input + size_t(row) * stride, stride, sums);
        for (int r = 0; r < count; r++) {
            const float* results = sums + 2 * r * kPanelRows;
            store_pair_row(output, row + r, _mm512_load_ps(results), _mm512_load_ps(results + kPanelRows));
        }
        row += count;
    }
}

void matmul(const MatmulJob& job, int begin, int end, uint8_t*) {
    const int factor = job.epilogue.gated ? 2 : 1, pass = pass_rows(row_bytes(job.weights->columns));
    for (int row = 0; row < job.rows; row += pass) {
        const int last = row + pass < job.rows ? row + pass : job.rows;
        for (int panel = begin * factor; panel < end * factor; panel += 2)
            multiply_rows(job, panel, panel + 1 >= end * factor, row, last);
    }
}

}  // namespace

void fill_per_channel_avx512(Kernels& table) {
    constexpr int kRows = int(Numerics::INT8_PER_CHANNEL);
    table.packed_bytes[kRows] = packed_bytes;
    table.pack[kRows] = pack;
    table.matmul[kRows] = matmul;
}

}  // namespace engine

// INT8 GEMM with VNNI, and F32 GEMM, in AVX-512.
//
// INT8: the integer dot product of a group is exact. In layouts with two scales per group, so is
// that of each half. It is multiplied by the activation scale, which gives `dot` below. Then the
// following terms are added to the float accumulator, in this order. Each addition rounds once:
//     one scale per group    dot * scale,  activation sum * minimum
//     two scales per group   dot * scale of the first half, dot * scale of the second half,
//                            activation sum of the first half * (first minimum - second minimum),
//                            activation sum * second minimum
// In layouts whose bytes have an offset of 128, the minimum is -128 * scale.
//
// F32: each output has two accumulators. One sums the products at even positions of K, the other
// those at odd positions.
#include "matmul/matmul_avx512.h"

#include "base/dispatch.h"
#include "matmul/outliers.h"

namespace engine {
namespace {

// In each lane, adds to `dots` the dot product of four bytes and `word`. It is inline assembly: one
// instruction with a broadcast operand. The intrinsic would compile to a load, a broadcast and a
// dot product.
ENGINE_INLINE void multiply_word(__m512i& dots, __m512i bytes, const int32_t& word) {
    __asm__("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(dots) : "v"(bytes), "m"(word));
}

template <int R>
ENGINE_INLINE void multiply(__m512i (&dots)[R], __m512i bytes, const InputRows<R>& rows, int word) {
    unroll<R>([&](auto i) ENGINE_UNROLLED {
        multiply_word(dots[i], bytes, rows.template at<InputGroup>(i).values[word]);
    });
}

// Multiplies the dot products by their scales and adds them to `sums`. The integers in `dots`
// started at kRoundShiftBits, so their bits are already valid floats and need no conversion.
template <int R>
ENGINE_INLINE void add_dots(__m512 (&sums)[R], const __m512i (&dots)[R], __m512 scale,
                            const InputRows<R>& rows) {
    unroll<R>([&](auto i) ENGINE_UNROLLED {
        const InputGroup& group = rows.template at<InputGroup>(i);
        __m512 product = _mm512_set1_ps(group.shift);
        __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(product) : "v"(dots[i]), "m"(group.scale));
        sums[i] = _mm512_fmadd_ps(product, scale, sums[i]);
    });
}

template <int R>
ENGINE_INLINE void add_minima(__m512 (&sums)[R], __m512 minimum, const InputRows<R>& rows,
                              float InputGroup::* input_sum) {
    unroll<R>([&](auto i) ENGINE_UNROLLED {
        __m512 input = _mm512_set1_ps(rows.template at<InputGroup>(i).*input_sum);
        sums[i] = _mm512_fmadd_ps(input, minimum, sums[i]);
    });
}

template <Layout L, int R>
ENGINE_INLINE void add_group(__m512 (&sums)[R], const uint8_t* panel, int groups, int index,
                             const InputRows<R>& rows) {
    const uint8_t* group = panel + size_t(index) * group_bytes(L);
    __m512i dots[R];
    auto clear = [&](auto i) ENGINE_UNROLLED { dots[i] = _mm512_set1_epi32(kRoundShiftBits); };
    auto first = [&](auto quad)
                     ENGINE_UNROLLED { multiply<R>(dots, four_values<L, 0>(group, quad), rows, quad); };
    auto second = [&](auto quad)
                      ENGINE_UNROLLED { multiply<R>(dots, four_values<L, 1>(group, quad), rows, 4 + quad); };
    unroll<R>(clear);
    if constexpr (scales_per_group(L) == 2) {
        unroll<4>(first);
        Scales low = load_scales<L>(panel, groups, index, 0), high = load_scales<L>(panel, groups, index, 1);
        add_dots<R>(sums, dots, low.scale, rows);
        unroll<R>(clear);
        unroll<4>(second);
        add_dots<R>(sums, dots, high.scale, rows);
        add_minima<R>(sums, _mm512_sub_ps(low.minimum, high.minimum), rows, &InputGroup::first_sum);
        add_minima<R>(sums, high.minimum, rows, &InputGroup::sum);
    } else {
        unroll<4>([&](auto quad) ENGINE_UNROLLED {
            first(quad);
            second(quad);
        });
        Scales weight = load_scales<L>(panel, groups, index, 0);
        add_dots<R>(sums, dots, weight.scale, rows);
        add_minima<R>(sums, weight.minimum, rows, &InputGroup::sum);
    }
}

template <Layout L, int R>
void dot_int8(const uint8_t* panel, const uint8_t* input, size_t stride, int groups, bool prefetch,
              float* out) {
    const int stream = L == Layout::Q8 ? 544 : int(group_bytes(L));  // Q8: including its scales
    InputRows<R> rows(input, stride);
    __m512 sums[R];
    unroll<R>([&](auto i) ENGINE_UNROLLED { sums[i] = _mm512_setzero_ps(); });
    for (int index = 0; index < groups; index++) {
        if (prefetch) prefetch_lines(panel + size_t(index) * stream, div_up(stream, 64));
        add_group<L, R>(sums, panel, groups, index, rows);
        rows.advance(sizeof(InputGroup));
    }
    unroll<R>([&](auto i) ENGINE_UNROLLED { _mm512_store_ps(out + i * kPanelRows, sums[i]); });
}

ENGINE_INLINE void pack_group(__m512 low, __m512 high, float scale, float inverse, InputGroup& out) {
    const __m512 factor = _mm512_set1_ps(inverse);
    __m128i first = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(low, factor)));
    __m128i second = _mm512_cvtsepi32_epi8(_mm512_cvtps_epi32(_mm512_mul_ps(high, factor)));
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.values), first);
    _mm_storeu_si128(reinterpret_cast<__m128i*>(out.values + 4), second);
    const __m128i ones = _mm_set1_epi8(1);
    __m128i first_sums = _mm_dpbusd_epi32(_mm_setzero_si128(), ones, first);
    __m128i sums = _mm_hadd_epi32(_mm_dpbusd_epi32(first_sums, ones, second), first_sums);
    sums =
        _mm_blend_epi32(_mm_setr_epi32(1, -int32_t(kRoundShift), 0, 0), _mm_hadd_epi32(sums, sums), 0b1100);
    _mm_storeu_ps(&out.scale, _mm_mul_ps(_mm_cvtepi32_ps(sums), _mm_set1_ps(scale)));
}

// Quantizes up to 16 groups of a row.
void pack_groups(const float* x, int columns, InputGroup* out) {
    const int count = div_up(columns, kGroup);
    alignas(64) uint32_t absmax_bits[16] = {};
    alignas(64) float scales[16], inverses[16];
    auto load = [&](int at)
                    ENGINE_UNROLLED { return _mm512_maskz_loadu_ps(first_lanes(columns - at), x + at); };
    for (int i = 0; i < count; i++) {
        // The magnitudes are compared as uint32 bit patterns. NaN is the largest of them, so it
        // becomes the absmax and makes the scale NaN.
        __m512i low = _mm512_castps_si512(_mm512_abs_ps(load(i * kGroup)));
        __m512i high = _mm512_castps_si512(_mm512_abs_ps(load(i * kGroup + 16)));
        absmax_bits[i] = _mm512_reduce_max_epu32(_mm512_max_epu32(low, high));
    }
    const __m512 absmax = _mm512_load_ps(absmax_bits), top = _mm512_set1_ps(127.0f);
    const __mmask16 some = _mm512_cmp_ps_mask(absmax, _mm512_set1_ps(1e-30f), _CMP_NLT_UQ);
    const __m512i scale = _mm512_castps_si512(_mm512_maskz_div_ps(some, absmax, top));
    _mm512_store_si512(scales, _mm512_and_si512(scale, _mm512_set1_epi32(~3)));
    _mm512_store_ps(inverses, _mm512_maskz_div_ps(some, top, absmax));
    for (int i = 0; i < count; i++)
        pack_group(load(i * kGroup), load(i * kGroup + 16), scales[i], inverses[i], out[i]);
}

size_t row_bytes_int8(int columns) {
    return size_t(div_up(columns, kGroup)) * sizeof(InputGroup);
}
size_t row_bytes_f32(int columns) {
    return size_t(round_up(columns, kGroup)) * sizeof(float);
}

size_t packed_bytes_int8(int rows, int columns) {
    return size_t(rows) * row_bytes_int8(columns);
}
size_t packed_bytes_f32(int rows, int columns) {
    return size_t(rows) * row_bytes_f32(columns);
}

void pack_int8(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    for (int row = begin; row < end; row++) {
        const float* from = x + size_t(row) * size_t(stride);
        InputGroup* out = reinterpret_cast<InputGroup*>(input + size_t(row) * row_bytes_int8(columns));
        for (int at = 0; at < columns; at += 16 * kGroup, out += 16) {
            int count = columns - at < 16 * kGroup ? columns - at : 16 * kGroup;
            pack_groups(from + at, count, out);
        }
    }
}

void pack_int8_outliers(const float* x, int stride, int columns, int rows, int begin, int end,
                        uint8_t* input) {
    const int groups = div_up(columns, kGroup);
    Outlier* lists = outliers_after(input, packed_bytes_int8(rows, columns));
    for (int row = begin; row < end; row++) {
        InputGroup* out = reinterpret_cast<InputGroup*>(input + size_t(row) * row_bytes_int8(columns));
        float rest[16 * kGroup];
        without_outliers(x + size_t(row) * size_t(stride), columns, lists + outliers_begin(row, groups),
                         [&](const float* group, int g) ALWAYS {
                             memcpy(rest + g % 16 * kGroup, group, kGroup * sizeof(float));
                             if (g % 16 < 15 && g + 1 < groups) return;
                             pack_groups(rest, (g % 16 + 1) * kGroup, out + g / 16 * 16);
                         });
    }
}

void pack_f32(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    const size_t used = size_t(columns) * sizeof(float), size = row_bytes_f32(columns);
    for (int row = begin; row < end; row++) {
        uint8_t* out = input + size_t(row) * size;
        memcpy(out, x + size_t(row) * size_t(stride), used);
        memset(out + used, 0, size - used);
    }
}

// Dequantizes a quantized group. Calls sink(k, value) for k = 0 to 31 in ascending order. `value`
// is a vector of floats: value k of each of the 16 channels.
template <Layout L, class Sink>
ENGINE_INLINE void dequantize_quants(const uint8_t* panel, int groups, int index, Sink sink) {
    const uint8_t* group = panel + size_t(index) * group_bytes(L);
    unroll<2>([&](auto half) ENGINE_UNROLLED {
        Scales weight = load_scales<L>(panel, groups, index, scales_per_group(L) == 2 ? half : 0);
        unroll<4>([&](auto quad) ENGINE_UNROLLED {
            __m512i bytes = four_values<L, half>(group, quad);
            unroll<4>([&](auto i) ENGINE_UNROLLED {
                __m512i value = _mm512_and_si512(_mm512_srli_epi32(bytes, 8 * i), _mm512_set1_epi32(255));
                if constexpr (has_minima(L)) {
                    __m512 quant = _mm512_cvtepi32_ps(value);
                    sink(16 * half + 4 * quad + i, _mm512_fmadd_ps(weight.scale, quant, weight.minimum));
                } else {
                    __m512 quant = _mm512_cvtepi32_ps(_mm512_sub_epi32(value, _mm512_set1_epi32(128)));
                    sink(16 * half + 4 * quad + i, _mm512_mul_ps(weight.scale, quant));
                }
            });
        });
    });
}

template <Layout L, class Sink>
ENGINE_INLINE void convert_floats(const uint8_t* group, Sink sink) {
    if constexpr (L == Layout::F32) {
        unroll<32>([&](auto k) ENGINE_UNROLLED { sink(k, _mm512_load_ps(group + 64 * k)); });
    } else {
        unroll<16>([&](auto pair) ENGINE_UNROLLED {
            __m512i both = _mm512_load_si512(group + 64 * pair);
            __m512i high = _mm512_and_si512(both, _mm512_set1_epi32(int(0xffff0000)));
            if constexpr (L == Layout::BF16) {
                sink(2 * pair, _mm512_castsi512_ps(_mm512_slli_epi32(both, 16)));
                sink(2 * pair + 1, _mm512_castsi512_ps(high));
            } else {
                sink(2 * pair, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(both)));
                sink(2 * pair + 1, _mm512_cvtph_ps(_mm512_cvtepi32_epi16(_mm512_srli_epi32(both, 16))));
            }
        });
    }
}

template <Layout L, class Sink>
ENGINE_INLINE void dequantize_group(const uint8_t* panel, int groups, int index, Sink sink) {
    prefetch_lines(panel + size_t(index) * group_bytes(L), int(group_bytes(L)) / 64);
    if constexpr (L < Layout::F16)
        dequantize_quants<L>(panel, groups, index, sink);
    else
        convert_floats<L>(panel + size_t(index) * group_bytes(L), sink);
}

template <Layout L>
void dequantize_panel(const uint8_t* panel, int groups, float* out) {
    for (int index = 0; index < groups; index++, out += kGroup * kPanelRows)
        dequantize_group<L>(panel, groups, index, [&](int k, __m512 value) ENGINE_UNROLLED {
            _mm512_store_ps(out + k * kPanelRows, value);
        });
}

// GEMV: multiplies one row by a panel. Weights are dequantized in registers, without scratch memory.
template <Layout L>
void dot_f32_row(const uint8_t* panel, const uint8_t* input, size_t, int groups, bool, float* out) {
    const float* values = reinterpret_cast<const float*>(input);
    __m512 even = _mm512_setzero_ps(), odd = _mm512_setzero_ps();
    for (int index = 0; index < groups; index++, values += kGroup)
        dequantize_group<L>(panel, groups, index, [&](int k, __m512 value) ENGINE_UNROLLED {
            __m512& sum = k % 2 ? odd : even;
            sum = _mm512_fmadd_ps(value, _mm512_set1_ps(values[k]), sum);
        });
    _mm512_store_ps(out, _mm512_add_ps(even, odd));
}

template <int R>
void dot_f32(const uint8_t* panel, const uint8_t* input, size_t stride, int groups, bool prefetch,
             float* out) {
    InputRows<R> rows(input, stride);
    __m512 even[R], odd[R];
    unroll<R>([&](auto i) ENGINE_UNROLLED { even[i] = odd[i] = _mm512_setzero_ps(); });
    for (int pair = 0; pair < groups * kGroup / 2; pair++, panel += 128) {
        if (prefetch) prefetch_lines(panel, 2);
        __m512 first = _mm512_load_ps(panel), second = _mm512_load_ps(panel + 64);
        unroll<R>([&](auto i) ENGINE_UNROLLED {
            const float* values = &rows.template at<float>(i);
            even[i] = _mm512_fmadd_ps(first, _mm512_set1_ps(values[0]), even[i]);
            odd[i] = _mm512_fmadd_ps(second, _mm512_set1_ps(values[1]), odd[i]);
        });
        rows.advance(2 * sizeof(float));
    }
    unroll<R>([&](auto i)
                  ENGINE_UNROLLED { _mm512_store_ps(out + i * kPanelRows, _mm512_add_ps(even[i], odd[i])); });
}

template <Layout L, int... I>
const Dot* int8_dots(std::integer_sequence<int, I...>) {
    static constexpr Dot dots[] = {dot_int8<L, I + 1>...};
    return dots;
}

template <int... I>
const Dot* f32_dots(std::integer_sequence<int, I...>) {
    static constexpr Dot dots[] = {dot_f32<I + 1>...};
    return dots;
}

template <Layout L>
void add_outliers(const MatmulJob& job, int unit, bool is_new, int first, int size, float* sums,
                  uint8_t* scratch) {
    OutlierUnit<L> outliers(job, unit, scratch);
    if (is_new) outliers.prepare();
    for (int row = 0; row < size; row++)
        outliers.add(first + row, sums + row * kPanelRows, kBlockRows * kPanelRows);
}

using BlockSizes = std::make_integer_sequence<int, kBlockRows>;

void matmul_int8(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    GemmKernel kernel{nullptr, row_bytes_int8(job.weights->columns), nullptr, nullptr};
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16) {
            kernel.dots = int8_dots<layout>(BlockSizes{});
            if (job.outliers) kernel.add_outliers = add_outliers<layout>;
            OutlierUnit<layout>::collect(job, scratch);
        }
    });
    run_units(job, kernel, begin, end, scratch);
}

size_t packed_bytes_int8_outliers(int rows, int columns) {
    return bytes_with_outliers(packed_bytes_int8(rows, columns), rows, columns);
}

void matmul_int8_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    matmul_int8(with_outliers(job, packed_bytes_int8(job.rows, job.weights->columns)), begin, end, scratch);
}

template <Layout L>
void matmul_f32_for(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    static constexpr Dot one_row = dot_f32_row<L>;
    GemmKernel kernel{f32_dots(BlockSizes{}), row_bytes_f32(job.weights->columns), dequantize_panel<L>,
                      nullptr};
    if (job.rows == 1) kernel.dots = &one_row;
    if (job.rows == 1 || L == Layout::F32) kernel.dequantize = nullptr;
    run_units(job, kernel, begin, end, scratch);
}

void matmul_f32(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout, [&](auto layout) { matmul_f32_for<layout>(job, begin, end, scratch); });
}

// The scratch memory holds two panels that are dequantized to float, or the columns of outliers.
size_t scratch_bytes(int columns) {
    return round_up_size(outlier_scratch_bytes(columns), 64);
}

}  // namespace

void fill_matmul_avx512(Kernels& table) {
    table.packed_bytes[int(Numerics::F32)] = packed_bytes_f32;
    table.pack[int(Numerics::F32)] = pack_f32;
    table.matmul[int(Numerics::F32)] = matmul_f32;
    table.packed_bytes[int(Numerics::INT8)] = packed_bytes_int8;
    table.pack[int(Numerics::INT8)] = pack_int8;
    table.matmul[int(Numerics::INT8)] = matmul_int8;
    table.packed_bytes[int(Numerics::INT8_OUTLIERS)] = packed_bytes_int8_outliers;
    table.pack[int(Numerics::INT8_OUTLIERS)] = pack_int8_outliers;
    table.matmul[int(Numerics::INT8_OUTLIERS)] = matmul_int8_outliers;
    table.scratch_bytes = scratch_bytes;
}

}  // namespace engine

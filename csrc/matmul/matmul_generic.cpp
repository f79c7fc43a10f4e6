// Portable GEMM. It is also the definition of F32 and INT8 arithmetic, with which the faster
// kernels are compared.
//
// Each panel is dequantized once to scratch memory, then multiplied by all rows of activations.
#include "base/dispatch.h"
#include "base/with_layout.h"
#include "matmul/dequantize.h"
#include "matmul/epilogue.h"
#include "matmul/packed_input.h"

namespace engine {
namespace {

constexpr int kVectors = kPanelRows / kLanes;

// A dequantized group of a panel.
struct FloatGroup {
    float values[kGroup * kPanelRows];
};

// A group of a panel as unscaled integers, which are stored as floats. The dot product of a group
// is exact in float: it is at most 32 * 255 * 127, and integers below 2^24 are exact.
struct QuantizedGroup {
    float values[kGroup * kPanelRows];
    float scales[2 * kPanelRows];  // [scale][16 channels]
    float minima[2 * kPanelRows];
};

struct FloatInput {
    float values[kGroup];
};

static_assert(2 * sizeof(QuantizedGroup) >= 2 * (kGroup * kPanelRows + 1) * sizeof(float),
              "the outliers of the faster kernels fit, too");

size_t scratch_bytes(int columns) {  // a gated unit needs memory for two panels
    return 2 * size_t(div_up(columns, kGroup)) * sizeof(QuantizedGroup);
}

// sums[n] += values[k][n] * x[k] for 16 channels n and `count` values k.
ENGINE_INLINE void add_products(const float* values, const float* x, int count, Floats (&sums)[kVectors]) {
    for (int k = 0; k < count; k++)
        for (int i = 0; i < kVectors; i++) sums[i] += load(values + k * kPanelRows + i * kLanes) * x[k];
}

// Packed activations: each row is zero-padded to whole groups of 32 values.
ENGINE_INLINE size_t packed_bytes_int8(int rows, int columns) {
    return size_t(rows) * size_t(div_up(columns, kGroup)) * sizeof(PackedGroup);
}

ENGINE_INLINE size_t packed_bytes_f32(int rows, int columns) {
    return size_t(rows) * size_t(round_up(columns, kGroup)) * sizeof(float);
}

void pack_int8(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    const int groups = div_up(columns, kGroup);
    for (int row = begin; row < end; row++) {
        PackedGroup* out = reinterpret_cast<PackedGroup*>(input) + size_t(row) * size_t(groups);
        for_groups(x + size_t(row) * size_t(stride), columns,
                   [&](const float* group, int g) ALWAYS { pack_group(group, out[g]); });
    }
}

void pack_int8_outliers(const float* x, int stride, int columns, int rows, int begin, int end,
                        uint8_t* input) {
    const int groups = div_up(columns, kGroup);
    Outlier* lists = outliers_after(input, packed_bytes_int8(rows, columns));
    for (int row = begin; row < end; row++) {
        PackedGroup* out = reinterpret_cast<PackedGroup*>(input) + size_t(row) * size_t(groups);
        without_outliers(x + size_t(row) * size_t(stride), columns, lists + outliers_begin(row, groups),
                         [&](const float* group, int g) ALWAYS { pack_group(group, out[g]); });
    }
}

void pack_f32(const float* x, int stride, int columns, int, int begin, int end, uint8_t* input) {
    int padded = round_up(columns, kGroup);
    for (int row = begin; row < end; row++) {
        float* out = reinterpret_cast<float*>(input) + size_t(row) * size_t(padded);
        memcpy(out, x + size_t(row) * size_t(stride), size_t(columns) * sizeof(float));
        for (int i = columns; i < padded; i++) out[i] = 0;
    }
}

template <Layout layout>
struct FloatMatmul {
    static constexpr bool kQuantized = false;
    using Group = FloatGroup;
    using Input = FloatInput;

    static void dequantize(const uint8_t* panel, int groups, int g, FloatGroup& out) {
        dequantize_group<layout>(panel, groups, g, out.values);
    }

    static void multiply(const FloatGroup* panel, const FloatInput* x, int groups, Floats (&sums)[kVectors]) {
        for (int g = 0; g < groups; g++) add_products(panel[g].values, x[g].values, kGroup, sums);
    }
};

template <Layout layout>
struct QuantizedMatmul {
    static constexpr bool kQuantized = true;
    using Group = QuantizedGroup;
    using Input = PackedGroup;
    static constexpr int kScales = scales_per_group(layout), kValuesPerScale = kGroup / kScales;

    static void dequantize(const uint8_t* panel, int groups, int g, QuantizedGroup& out) {
        const uint8_t* group = panel + size_t(g) * group_bytes(layout);
        const float offset = has_minima(layout) ? 0.0f : 128.0f;
        for (int n = 0; n < kPanelRows; n += kLanes)
#pragma GCC unroll 32
            for (int k = 0; k < kGroup; k++)
                store(out.values + k * kPanelRows + n, stored_values<layout>(group, k, n) - offset);
        const uint16_t* scales = scales_of<layout>(panel, groups, g);
        for (int i = 0; i < kScales * kPanelRows; i += kLanes) {
            store(out.scales + i, load_halves(scales + i));
            if (has_minima(layout)) store(out.minima + i, load_halves(scales + kScales * kPanelRows + i));
        }
    }

    static void multiply(const QuantizedGroup* panel, const PackedGroup* x, int groups,
                         Floats (&sums)[kVectors]) {
        for (int g = 0; g < groups; g++) {
            const QuantizedGroup& weights = panel[g];
            float values[kGroup];
            for (int k = 0; k < kGroup; k++) values[k] = x[g].values[k];
            for (int part = 0; part < kScales; part++) {
                int first = part * kValuesPerScale, row = part * kPanelRows;
                Floats dots[kVectors] = {};
                add_products(weights.values + first * kPanelRows, values + first, kValuesPerScale, dots);
                int sum = kScales == 2 ? x[g].sums[part] : x[g].sums[0] + x[g].sums[1];
                float scaled_sum = float(sum) * x[g].scale;
                for (int i = 0; i < kVectors; i++) {
                    sums[i] += dots[i] * (load(weights.scales + row + i * kLanes) * x[g].scale);
                    if (has_minima(layout)) sums[i] += load(weights.minima + row + i * kLanes) * scaled_sum;
                }
            }
        }
    }

    static void add_outliers(const QuantizedGroup* panel, const Outlier* list, Floats (&sums)[kVectors]) {
        for (; list->column >= 0; list++) {
            const QuantizedGroup& weights = panel[list->column / kGroup];
            const int k = list->column % kGroup, row = k / kValuesPerScale * kPanelRows;
            for (int i = 0; i < kVectors; i++) {
                Floats weight = load(weights.values + k * kPanelRows + i * kLanes);
                weight *= load(weights.scales + row + i * kLanes);
                if (has_minima(layout)) weight += load(weights.minima + row + i * kLanes);
                sums[i] += weight * list->value;
            }
        }
    }
};

template <class Kernel>
void multiply_units(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    const Matrix& weights = *job.weights;
    int groups = weights.groups(), panels = job.epilogue.gated ? 2 : 1;
    auto dequantized = reinterpret_cast<typename Kernel::Group*>(scratch);
    auto input = reinterpret_cast<const typename Kernel::Input*>(job.input);
    for (int unit = begin; unit < end; unit++) {
        for (int i = 0; i < panels; i++)
            for (int g = 0; g < groups; g++)
                Kernel::dequantize(weights.panel(unit * panels + i), groups, g, dequantized[i * groups + g]);
        for (int row = 0; row < job.rows; row++) {
            float out[2 * kPanelRows];
            for (int i = 0; i < panels; i++) {
                Floats sums[kVectors] = {};
                Kernel::multiply(dequantized + i * groups, input + size_t(row) * size_t(groups), groups,
                                 sums);
                if constexpr (Kernel::kQuantized)
                    if (job.outliers)
                        Kernel::add_outliers(dequantized + i * groups,
                                             job.outliers + outliers_begin(row, groups), sums);
                memcpy(out + i * kPanelRows, sums, sizeof sums);
            }
            apply_epilogue(job, unit, row, out);
        }
    }
}

void multiply_quantized(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout, [&](auto layout) {
        if constexpr (layout < Layout::F16) multiply_units<QuantizedMatmul<layout>>(job, begin, end, scratch);
    });
}

size_t packed_bytes_int8_outliers(int rows, int columns) {
    return bytes_with_outliers(packed_bytes_int8(rows, columns), rows, columns);
}

void matmul_int8_outliers(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    multiply_quantized(with_outliers(job, packed_bytes_int8(job.rows, job.weights->columns)), begin, end,
                       scratch);
}

void multiply_floats(const MatmulJob& job, int begin, int end, uint8_t* scratch) {
    with_layout(job.weights->layout,
                [&](auto layout) { multiply_units<FloatMatmul<layout>>(job, begin, end, scratch); });
}

}  // namespace

void fill_matmul_generic(Kernels& table) {
    constexpr int kInt8 = int(Numerics::INT8), kOutliers = int(Numerics::INT8_OUTLIERS),
                  kF32 = int(Numerics::F32);
    table.packed_bytes[kInt8] = packed_bytes_int8;
    table.pack[kInt8] = pack_int8;
    table.matmul[kInt8] = multiply_quantized;
    table.packed_bytes[kOutliers] = packed_bytes_int8_outliers;
    table.pack[kOutliers] = pack_int8_outliers;
    table.matmul[kOutliers] = matmul_int8_outliers;
    table.packed_bytes[kF32] = packed_bytes_f32;
    table.pack[kF32] = pack_f32;
    table.matmul[kF32] = multiply_floats;
    table.scratch_bytes = scratch_bytes;
}

}  // namespace engine

// The F32 GEMM of AVX2 and NEON, built on a kernel that multiplies one group of weights. With at
// most kBlock rows, each group is dequantized when it is read. With more rows, whole panels are
// dequantized first.
#pragma once
#include "matmul/dequantize.h"
#include "matmul/epilogue.h"

namespace engine {
namespace {

constexpr int kBlock = 4;  // rows of activations that share each load of the weights

// A function that multiplies consecutive dequantized groups of weights by a fixed number of rows
// and adds the products of each group to `sums`. Row r of the input starts at input + r * stride,
// its sums at sums + 32 r.
using AddGroups = void (*)(const float* weights, int groups, const float* input, int stride, float* sums);

// The weights of a unit (one panel, or a gate and an up panel) as groups of floats. Layout F32 is
// read in place. For other layouts, `once` says whether each group is read only once. If so, a
// group is dequantized when it is read; otherwise `dequantize_all` dequantizes all groups first.
template <Layout layout>
struct FloatUnit {
    static constexpr int kGroupFloats = kGroup * kPanelRows;
    const uint8_t* panels[2];
    int groups;
    bool once;
    float* scratch;

    void dequantize_all(int count) {
        if (layout == Layout::F32 || once) return;
        for (int i = 0; i < count; i++)
            for (int g = 0; g < groups; g++)
                dequantize_group<layout>(panels[i], groups, g,
                                         scratch + size_t(i * groups + g) * kGroupFloats);
    }

    void multiply(int i, AddGroups add, const float* input, float* sums) {
        const int stride = groups * kGroup;
        if (layout == Layout::F32)
            return add(reinterpret_cast<const float*>(panels[i]), groups, input, stride, sums);
        if (!once) return add(scratch + size_t(i * groups) * kGroupFloats, groups, input, stride, sums);
        for (int g = 0; g < groups; g++) {
            dequantize_group<layout>(panels[i], groups, g, scratch);
            add(scratch, 1, input + g * kGroup, stride, sums);
        }
    }
};

template <Layout layout>
void multiply_units_f32(const MatmulJob& job, int begin, int end, uint8_t* scratch,
                        const AddGroups (&add)[kBlock]) {
    const Matrix& weights = *job.weights;
    int groups = weights.groups(), panels = job.epilogue.gated ? 2 : 1, stride = groups * kGroup;
    auto input = reinterpret_cast<const float*>(job.input);
    for (int unit = begin; unit < end; unit++) {
        const uint8_t* first = weights.panel(unit * panels);
        FloatUnit<layout> dequantized{
            {first, first + weights.stride()}, groups, job.rows <= kBlock, reinterpret_cast<float*>(scratch)};
        dequantized.dequantize_all(panels);
        for (int row = 0; row < job.rows; row += kBlock) {
            int rows = job.rows - row < kBlock ? job.rows - row : kBlock;
            const float* x = input + size_t(row) * size_t(stride);
            float sums[kBlock][2 * kPanelRows] = {};
            for (int i = 0; i < panels; i++)
                dequantized.multiply(i, add[rows - 1], x, sums[0] + i * kPanelRows);
            for (int r = 0; r < rows; r++) apply_epilogue(job, unit, row + r, sums[r]);
        }
    }
}

}  // namespace
}  // namespace engine

// Portable norms, RoPE, reductions over logits, embedding lookup and second matrices of LoRA adapters.
#include "base/dispatch.h"
#include "base/with_layout.h"
#include "matmul/dequantize.h"
#include "vector/expand.h"
#include "vector/vector_kernels.h"

namespace engine {
namespace {

template <Layout layout>
void embed_floats(const Matrix& table, int index, float* out) {
    const uint8_t* panel = table.panel(index / kPanelRows);
    int n = index % kPanelRows;
    for (int i = 0; i < table.columns; i++) {
        const uint8_t* group = panel + size_t(i / kGroup) * group_bytes(layout);
        int k = i % kGroup, pair = (k / 2 * kPanelRows + n) * 2 + k % 2;
        if (layout == Layout::F32) out[i] = reinterpret_cast<const float*>(group)[k * kPanelRows + n];
        if (layout == Layout::F16) out[i] = half_to_float(reinterpret_cast<const uint16_t*>(group)[pair]);
        if (layout == Layout::BF16) out[i] = bf16_to_float(reinterpret_cast<const uint16_t*>(group)[pair]);
    }
}

template <Layout layout>
ENGINE_INLINE int stored_value(const uint8_t* group, int k, int n) {
    if (!is_4_bit(layout)) return group[k / 4 * 64 + 4 * n + k % 4];
    uint8_t byte = group[k % 16 / 4 * 64 + 4 * n + k % 4];
    return k < 16 ? byte & 15 : byte >> 4;
}

template <Layout layout>
void embed_quantized(const Matrix& table, int index, float* out) {
    constexpr int share = kGroup / scales_per_group(layout), offset = has_minima(layout) ? 0 : 128;
    const uint8_t* panel = table.panel(index / kPanelRows);
    int n = index % kPanelRows;
    for (int begin = 0; begin < table.columns; begin += share) {
        int g = begin / kGroup, first = begin % kGroup;
        const uint8_t* group = panel + size_t(g) * group_bytes(layout);
        const uint16_t* scales = scales_of<layout>(panel, table.groups(), g) + first / share * kPanelRows;
        float scale = half_to_float(scales[n]), minimum = 0;
        if (has_minima(layout)) minimum = half_to_float(scales[scales_per_group(layout) * kPanelRows + n]);
        int count = table.columns - begin < share ? table.columns - begin : share;
        for (int k = 0; k < count; k++)
            out[begin + k] = scale * float(stored_value<layout>(group, first + k, n) - offset) + minimum;
    }
}

void embed(const Matrix& table, int index, float* out) {
    with_layout(table.layout, [&](auto layout) {
        if constexpr (layout < Layout::F16)
            embed_quantized<layout>(table, index, out);
        else
            embed_floats<layout>(table, index, out);
    });
}

}  // namespace

void fill_vector_generic(Kernels& table) {
    fill_vector(table);
    fill_expand(table);
    table.embed = embed;
}

}  // namespace engine
